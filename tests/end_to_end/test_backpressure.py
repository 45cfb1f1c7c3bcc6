"""Actors that send to a channel faster than its messages are received."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshgate import ActorError, Channel, ProcessJob
from tests.end_to_end.call_actors import MB, AsyncSender, Sender
from tests.end_to_end.test_faults import engine_of

MEMORY, DISK = 16 * MB, 16 * MB
HELD = (MEMORY + DISK) // MB + 64  # messages that are sent before a send waits: Monarch holds some, too
MESSAGES = 2 * HELD  # of 1 MiB
TIMEOUT = 120.0


def resident(pid: int) -> int:
    """The memory of a process in bytes."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def until_it_rests(count: Callable[[], int]) -> int:
    """The value of ``count()`` once it has not changed for two seconds."""
    last, since = count(), time.monotonic()
    while time.monotonic() < since + 2:
        time.sleep(0.1)
        if (now := count()) != last:
            last, since = now, time.monotonic()
    return last


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHGATE_CHANNEL_MEMORY", str(MEMORY))
    monkeypatch.setenv("MESHGATE_CHANNEL_DISK", str(DISK))


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("detached", [False, True])
def test_an_actor_waits_that_sends_what_no_one_receives_and_nothing_is_lost(detached: bool) -> None:
    with ProcessJob({"workers": 1}, detached=detached) as job:
        sender = job.state(cached_path=None).workers.spawn_procs().spawn("sender", Sender)
        port, receiver = Channel.open()
        sender.count.call_one().get()
        before = resident(engine_of(job))
        sender.from_thread.call_one(port, MESSAGES).get()
        waiting = until_it_rests(lambda: sender.count.call_one().get(TIMEOUT))
        assert waiting < HELD
        assert resident(engine_of(job)) < before + 128 * MB
        received = [receiver.recv().get(TIMEOUT)[0] for _ in range(MESSAGES)]
        assert received == list(range(MESSAGES))
        job.kill()


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("kind", [Sender, AsyncSender])
def test_endpoints_wait_until_the_messages_are_received(kind: type[Any]) -> None:
    with ProcessJob({"workers": 1}) as job:
        sender = job.state().workers.spawn_procs().spawn("sender", kind)
        port, receiver = Channel.open()
        sent = sender.from_endpoint.call_one(port, MESSAGES)
        with pytest.raises(TimeoutError):
            sent.get(5)
        assert [receiver.recv().get(TIMEOUT)[0] for _ in range(MESSAGES)] == list(range(MESSAGES))
        assert sent.get(TIMEOUT) == MESSAGES


@pytest.mark.usefixtures("small_limits")
def test_a_returned_port_waits_too_and_the_end_of_its_channel_is_an_error_in_its_senders() -> None:
    with ProcessJob({"workers": 2}) as job:
        actors = job.state().workers.spawn_procs().spawn("sender", Sender)
        giver, sender = actors.slice(hosts=0), actors.slice(hosts=1)
        port, receiver = Channel.open()
        returned = giver.give.call_one(port).get()
        sent = sender.from_endpoint.call_one(returned, MESSAGES)
        with pytest.raises(TimeoutError):
            sent.get(5)
        del port, receiver
        gc.collect()
        with pytest.raises(ActorError, match="the channel was closed while this send waited"):
            sent.get(TIMEOUT)
