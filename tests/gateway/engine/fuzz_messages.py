"""A fuzz target: whatever valid messages an authenticated client sends, the engine reports errors and continues.

``python -m tests.gateway.engine.fuzz_messages --seconds 60`` mutates the messages of a session that uses every kind of
them. A failure prints the seed that reproduces it. The test suite runs a fixed number of the same mutations.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from meshgate_gateway.engine.detached.holders import Applicant
from meshgate_wire import State
from meshgate_wire.message_codec import load_header
from meshgate_wire.messages import Detach, Done, Header
from tests.gateway.engine.fakes import FakePort
from tests.gateway.engine.in_memory import EngineClient

PART = {"object": 4, "region": {"labels": ["hosts"], "offset": 0, "sizes": [2], "strides": [1]}}
TRAFFIC: list[tuple[int, dict[str, Any], list[bytes]]] = [
    # (stream, header, buffers) of a whole session
    (0, {"type": "configure", "stream_output": True}, []),
    (1, {"type": "attach_hosts", "object": 1, "mesh": "workers"}, []),
    (2, {"type": "spawn_procs", "object": 2, "hosts": {"object": 1}, "per_host": {"gpus": 2}, "name": "procs"}, []),
    (3, {"type": "open_channel", "object": 3, "name": "numbers"}, []),
    (
        4,
        {
            "type": "spawn_actors", "object": 4, "procs": {"object": 2}, "name": "actors", "class_name": "a.B",
            "kind": "sync", "arguments": [{"kind": "port", "ref": {"object": 3}}],
        },
        [b"class", b"arguments"],
    ),
    (4, {"type": "initialized", "call": 1, "target": {"object": 4}}, []),
    (0, {"type": "detach", "call": 2, "name": "train"}, []),
    (4, {"type": "call", "call": 3, "target": {"object": 4}, "endpoint": "f", "adverb": "call", "tag": "a"}, [b"x"]),
    (4, {"type": "call", "call": 4, "target": {"object": 4}, "endpoint": "f", "adverb": "stream"}, [b"x"]),
    (4, {"type": "call", "call": 5, "target": PART, "endpoint": "f", "adverb": "choose"}, [b"x"]),
    (4, {"type": "call", "call": 6, "target": {"object": 4}, "endpoint": "f", "adverb": "broadcast"}, [b"x"]),
    (3, {"type": "port_send", "port": 3}, [b"x"]),
    (4, {"type": "send_to", "target": {"object": 4}, "endpoint": "f", "selection": "all", "port": 3}, [b"x"]),
    (0, {"type": "read", "calls": [3], "ports": {"3": 1}, "output": 1, "faults": 1, "released": [4]}, []),
    (0, {"type": "fetch", "calls": [3, 4]}, []),
    (0, {"type": "resume", "replay": True}, []),
    (5, {"type": "get_controllers", "object": 5, "hosts": {"object": 1}}, []),
    (6, {"type": "sync", "body": "{}"}, []),
    (4, {"type": "stop", "call": 7, "target": {"object": 4}, "reason": "enough"}, []),
    (0, {"type": "release", "objects": [4, 3]}, []),
]  # fmt: skip
NUMBERS = (-3, -1, 0, 1, 2, 3, 4, 5, 7, 99, 2**31, 2**53)
PROBE = 777  # a stream
TEXTS = ("", "workers", "procs", "actors", "f", "call", "all", "choose", "x" * 300, "\x00", "ü", "../..", "{}")
Message = tuple[int, Header, list[bytes]]


def mutate(choice: random.Random) -> list[Message]:
    """The messages of a session, some of them changed, missing, repeated or elsewhere. Those that the wire refuses are
    left out."""
    traffic = [*TRAFFIC]
    for _ in range(choice.randint(0, 4)):
        at, other = choice.randrange(len(traffic)), choice.randrange(len(traffic))
        change = choice.randrange(4)
        if change == 0:
            traffic[at], traffic[other] = traffic[other], traffic[at]
        elif change == 1:
            traffic.insert(at, traffic[other])
        elif change == 2 and len(traffic) > 1:
            del traffic[at]
        else:
            stream, header, buffers = traffic[at]
            traffic[at] = (choice.choice((0, 1, 4, stream)), header, choice.choice(([], buffers * 2, [b""], buffers)))
    for _ in range(choice.randint(1, 6)):
        at = choice.randrange(len(traffic))
        stream, header, buffers = traffic[at]
        traffic[at] = (stream, _changed(header, choice), buffers)
    return [(stream, header, buffers) for stream, fields, buffers in traffic for header in _parsed(fields)]


def _parsed(fields: dict[str, Any]) -> Iterator[Header]:
    try:
        yield load_header(json.dumps(fields).encode())
    except ValueError:
        return


def _changed(value: Any, choice: random.Random) -> Any:
    """A copy of ``value`` with one part changed."""
    if isinstance(value, dict) and value:
        name = choice.choice([each for each in value if each != "type"] or [*value])
        if choice.random() < 0.15:
            return {each: part for each, part in value.items() if each != name}
        return {**value, name: _changed(value[name], choice)}
    if isinstance(value, list) and value:
        at = choice.randrange(len(value))
        if choice.random() < 0.3:
            return value * 2 if choice.random() < 0.5 else value[:at]
        return [*value[:at], _changed(value[at], choice), *value[at + 1 :]]
    if isinstance(value, bool):
        return not value
    return choice.choice(NUMBERS if isinstance(value, int) else TEXTS)


async def run(seed: int) -> int:
    """Sends the mutation ``seed`` to an engine. Returns how many messages. Raises AssertionError."""
    choice = random.Random(seed)
    messages = mutate(choice)
    problems: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(str(context)))
    with _errors_are(problems):
        client = EngineClient()
        engine = client.engine
        assert engine.admission.admit(Applicant("fuzz", "fuzz", takes_over=False)) is None
        for stream, header, buffers in messages:
            client.session.send(header, buffers, stream=stream)
            if choice.random() < 0.5:
                await client.turns(choice.randrange(8))
                _reply(client, choice)
        await client.turns(20)
        _reply(client, choice)
        client.session.send(Detach(call=2**40, name="alive"), stream=PROBE)  # others may wait for an object
        await client.turns(20)
        engine.link.session.validate_state()
        engine.validate_state()
        alive = any(done.call == 2**40 for done in client.of(Done))
        assert alive or engine.ended.is_set() or engine.link.session.state is State.FAILED, "the engine does not answer"
        await asyncio.wait_for(client.end(), 10)
    assert not problems, problems
    return len(messages)


def _reply(client: EngineClient, choice: random.Random) -> None:
    for port in client.monarch.ports:
        if isinstance(port, FakePort) and choice.random() < 0.7:
            port.put(b"reply", choice.choice((0, 1, 2, 3, None, 77)), exception=choice.random() < 0.2)


@contextmanager
def _errors_are(problems: list[str]) -> Iterator[None]:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            problems.append(f"{record.getMessage()} {record.exc_info}")

    handler = Handler(logging.ERROR)
    logging.getLogger("meshgate_gateway").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("meshgate_gateway").removeHandler(handler)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else "")
    options.add_argument("--seconds", type=float, default=10.0)
    options.add_argument("--seed", type=int, default=0, help="the first seed")
    arguments = options.parse_args()
    logging.disable(logging.WARNING)
    end = time.monotonic() + arguments.seconds
    seed, sent = arguments.seed, 0
    while time.monotonic() < end:
        try:
            sent += asyncio.run(run(seed))
        except BaseException:
            print(f"seed {seed} fails: reproduce it with --seed {seed}", file=sys.stderr)
            raise
        seed += 1
    print(f"{seed - arguments.seed:,} sessions of {sent:,} messages without a failure")


if __name__ == "__main__":
    main()
