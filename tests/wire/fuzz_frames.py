"""A fuzz target: for any input, a session returns or raises ``WireError``, and stays within its limits.

``python tests/wire/fuzz_frames.py --seconds 60`` mutates recorded conversations, guided by coverage if atheris is
installed, else at random. A failure prints the seed that reproduces it. The test suite runs a fixed number of the same
random mutations.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence

from meshgate_wire import Limits, Role, Session, State, WireError
from meshgate_wire.messages import Call, MeshRef, Output, OutputLine, Region, Release, Values

KIB = 1024
MANUAL = frozenset({2})
LIMITS = Limits(
    window=256 * KIB,
    max_websocket_message=512 * KIB,
    max_frame=64 * KIB,
    max_header=64 * KIB,
    max_buffers=8 * KIB,
    max_message=300 * KIB,
    max_partial_messages=4,
    max_partial_bytes=600 * KIB,
    max_tracked_streams=64,
    ack_after=32 * KIB,
    chunk=8 * KIB,
)
# Over all streams: incomplete messages, and unconsumed messages of MANUAL streams.
MAX_HELD = LIMITS.max_partial_bytes + len(MANUAL) * (LIMITS.window + 2 * LIMITS.max_message)
MAX_REDIALS = 5
INTERESTING = (0, 1, 3, 4, 7, 8, 0x7F, 0x80, 0xFF, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)


def fill(session: Session) -> None:
    """Queues messages of each kind."""
    region = Region(labels=("hosts",), offset=0, sizes=(4,), strides=(1,))
    target = MeshRef(object=1, region=region)
    session.send(Call(call=1, target=target, endpoint="f", adverb="call"), [b"x"], stream=1)
    session.send(Values(call=1), [bytes(100 * KIB), b"", bytes(30 * KIB)], stream=2)
    session.send(Values(call=2), [bytes(50)] * 300, stream=3)
    session.send(Release(objects=(1, -2)), stream=0)
    session.send(Output(lines=(OutputLine(stream="stdout", text="50 %", end="\r"),) * 3), stream=0)


def record(role: Role) -> list[bytes]:
    """The websocket messages of one side of a conversation."""
    session, peer = Session(role, limits=LIMITS), Session(role.other, limits=LIMITS)
    for side in (session, peer):
        side.connection_made()
        fill(side)
    recorded: list[bytes] = []
    active = True
    while active:
        active = False
        for sender, receiver in ((session, peer), (peer, session)):
            sender.acknowledge()
            message = b"".join(sender.data_to_send(20 * KIB))
            if message:
                active = True
                receiver.receive_data(message)
                if sender is session:
                    recorded.append(message)
    return recorded


def feed(messages: Sequence[bytes], role: Role) -> State:
    """Feeds ``messages`` to a new session, redialing after resumable errors. Returns its final state."""
    session = Session(role, limits=LIMITS)
    for stream in MANUAL:
        session.manual(stream)
    fill(session)
    session.connection_made()
    waiting = deque(messages)
    held = redials = 0
    while waiting:
        while session.data_to_send():
            pass
        try:
            events = session.receive_data(waiting.popleft())
        except WireError as error:
            redials += 1
            if not error.resumable or redials > MAX_REDIALS:
                break
            session.connection_made()
            received = session.statistics().frames_acknowledged
            waiting.appendleft(messages[0].replace(b'"received":0', b'"received":%d' % received))
            continue
        held += sum(getattr(event, "held", 0) for event in events)
        statistics = session.statistics()
        assert held + statistics.unfinished_bytes <= MAX_HELD
        assert statistics.streams_receiving <= LIMITS.max_tracked_streams
    session.validate_state()
    return session.state


def mutate(messages: Sequence[bytes], choice: random.Random) -> list[bytes]:
    """Changes a few bytes, numbers or messages of a conversation."""
    mutated = list(messages)
    for _ in range(choice.randint(1, 4)):
        at = choice.randrange(len(mutated))
        kind = choice.randrange(8)
        if kind == 0:
            mutated.insert(at, mutated[choice.randrange(len(mutated))])
        elif kind == 1 and len(mutated) > 1:
            del mutated[at]
        elif kind == 2:
            mutated.insert(at, choice.randbytes(choice.randrange(64)))
        else:
            mutated[at] = _mutate_bytes(mutated[at], choice)
    return mutated


def _mutate_bytes(message: bytes, choice: random.Random) -> bytes:
    data = bytearray(message)
    # Headers are near the start, and so are most of the changes.
    at = choice.randrange(min(len(data), choice.choice((17, 30, 80, 2**30))) or 1)
    kind = choice.randrange(4)
    if kind == 0:
        del data[at:]
    elif kind == 1:
        data[at : at + 1] = bytes((choice.randrange(256),))
    elif kind == 2:
        number = choice.choice(INTERESTING) + choice.randint(-1, 1)
        layout = choice.choice(("B", "!I", "!Q"))
        packed = struct.pack(layout, number % 256 ** struct.calcsize(layout))
        data[at : at + len(packed)] = packed
    else:
        data[at:at] = data[choice.randrange(len(data) or 1) :][: choice.randrange(200)]
    return bytes(data)


def run_seed(seed: int, recordings: Sequence[tuple[Role, list[bytes]]]) -> State:
    """Feeds a random mutation of a recording to its receiver."""
    return feed(*mutated(seed, recordings))


def mutated(seed: int, recordings: Sequence[tuple[Role, list[bytes]]]) -> tuple[list[bytes], Role]:
    choice = random.Random(seed)
    role, messages = choice.choice(recordings)
    return mutate(messages, choice), role


def recordings() -> list[tuple[Role, list[bytes]]]:
    return [(role, record(role.other)) for role in Role]


def one_input(data: bytes) -> None:
    """An input of atheris: a role, then messages, each after its u16 length, to be fed after the recorded hello."""
    role, messages = recordings_once()[data[0] % 2 if data else 0]
    remaining, inputs = data[1:], messages[:1]
    while len(remaining) >= 2:
        length = int.from_bytes(remaining[:2], "big")
        inputs.append(remaining[2 : 2 + length])
        remaining = remaining[2 + length :]
    feed(inputs, role)


_recordings: list[tuple[Role, list[bytes]]] = []


def recordings_once() -> list[tuple[Role, list[bytes]]]:
    _recordings.extend(() if _recordings else recordings())
    return _recordings


def fuzz_with_atheris(seconds: float) -> None:
    import atheris

    atheris.instrument_all()
    atheris.Setup([sys.argv[0], f"-max_total_time={int(seconds)}"], one_input)
    atheris.Fuzz()


def fuzz_at_random(seconds: float, seed: int) -> None:
    """Runs seeds, starting with ``seed``, until the time is over or one fails."""
    recorded = recordings()
    end = time.monotonic() + seconds
    states = dict.fromkeys(State, 0)
    first = seed
    inputs = 0
    while time.monotonic() < end:
        messages, role = mutated(seed, recorded)
        inputs += len(messages)
        try:
            states[feed(messages, role)] += 1
        except BaseException:
            print(f"seed {seed} fails: reproduce it with --seed {seed}", file=sys.stderr)
            raise
        seed += 1
    print(
        f"{seed - first:,} conversations of {inputs:,} messages without a failure:",
        {state.name: count for state, count in states.items() if count},
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else "")
    options.add_argument("--seconds", type=float, default=10.0)
    options.add_argument("--seed", type=int, default=0, help="the first seed of the random mutations")
    arguments = options.parse_args()
    if importlib.util.find_spec("atheris"):
        fuzz_with_atheris(arguments.seconds)
    else:
        fuzz_at_random(arguments.seconds, arguments.seed)


if __name__ == "__main__":
    main()
