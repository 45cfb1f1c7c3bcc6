"""Results, arguments and messages that the memory of the session's engine cannot hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from meshgate import ActorError, Channel, InvalidRequestError, ProcessJob
from tests.end_to_end.call_actors import MB, AsyncGiver, ConcurrentGiver, Giver
from tests.end_to_end.test_faults import engine_of
from tests.waiting import Printed, wait_for

LIMIT, FITS, TOO_LARGE = 32 * MB, 20 * MB, 256 * MB
TIMEOUT = 120.0
REFUSED = r"MemoryError: the result has 268\.4 MB, .* room for 33\.6 MB\. MESHGATE_VALUE_MEMORY=33554432 .*job\.pull"


def peak(pid: int) -> int:
    """The most memory that a process has had so far, in bytes."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@contextmanager
def little_arrives(job: ProcessJob) -> Iterator[None]:
    """The engine, whose allocator keeps some memory of earlier values, never holds what is too large."""
    before = peak(engine_of(job))
    yield
    assert peak(engine_of(job)) < before + TOO_LARGE / 2


@contextmanager
def reading_nothing(job: ProcessJob) -> Iterator[None]:
    """The driver does not read from its connection."""
    thread = job.client._connection
    transport = thread._connection.transport  # type: ignore[union-attr]
    thread._loop.call_soon_threadsafe(transport.pause_reading)
    try:
        yield
    finally:
        thread._loop.call_soon_threadsafe(transport.resume_reading)


def ended_calls(job: ProcessJob, name: str) -> int:
    meshes = [mesh for session in job.status().sessions for mesh in session.meshes if mesh.name == name]
    return sum(mesh.calls.ended for mesh in meshes if mesh.calls is not None)


@pytest.fixture(scope="module")
def job() -> Iterator[ProcessJob]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("MESHGATE_VALUE_MEMORY", str(LIMIT))
        with ProcessJob({"workers": 2}) as job:
            yield job


@pytest.fixture(scope="module")
def procs(job: ProcessJob) -> Any:
    """Two on each host: the second host's processes reply through ports of one another's, not of the engine's."""
    return job.state(cached_path=None).workers.spawn_procs(per_host={"gpus": 2})


@pytest.mark.parametrize("kind", [Giver, AsyncGiver])
@pytest.mark.parametrize("at", [0, 3])
def test_a_result_too_large_for_the_engine_fails_on_its_rank_alone(
    job: ProcessJob, procs: Any, kind: type[Any], at: int
) -> None:
    givers = procs.spawn(f"refused{kind.__name__}{at}", kind)
    values: list[Any] = []
    with little_arrives(job):
        for future in givers.give.stream(TOO_LARGE, at):
            try:
                values.append(future.get(TIMEOUT))
            except ActorError as error:
                values.append(str(error))
    (refusal,) = (value for value in values if isinstance(value, str))
    assert sorted(value for value in values if value is not refusal) == [rank for rank in range(4) if rank != at]
    with little_arrives(job), pytest.raises(ActorError, match=REFUSED) as raised:
        givers.give.call(TOO_LARGE, at).get(TIMEOUT)
    assert isinstance(raised.value.exception, MemoryError)
    for _ in range(3):  # the room is free again once a result has arrived
        (whole,) = (each for each in givers.give.call(FITS, at).get(TIMEOUT).values() if isinstance(each, bytes))
        assert len(whole) == FITS


@pytest.mark.parametrize("kind", [Giver, AsyncGiver])
@pytest.mark.parametrize("at", [0, 3])
def test_actors_give_each_other_what_the_engine_could_not_hold(
    job: ProcessJob, procs: Any, kind: type[Any], at: int
) -> None:
    givers, takers = procs.spawn(f"givers{kind.__name__}{at}", kind), procs.spawn(f"takers{kind.__name__}{at}", kind)
    taker = takers.slice(hosts=0, gpus=0)
    with little_arrives(job):
        assert taker.size_from.call_one(givers, TOO_LARGE, at).get(TIMEOUT) == TOO_LARGE


def test_a_kept_value_too_large_to_fetch_stays_and_the_error_does_not_advise_to_keep_it(
    job: ProcessJob, procs: Any
) -> None:
    givers = procs.spawn("keeping", Giver)
    kept = givers.give.keep(TOO_LARGE, 3)
    refusal = r"the kept value has 268\.4 MB, .* room for 33\.6 MB\. .* It stays in the cluster: pass it to other calls"
    with little_arrives(job), pytest.raises(ActorError, match=refusal):
        kept.get(TIMEOUT)
    assert list(kept.slice(hosts=0).get(TIMEOUT).values()) == [0, 1]
    assert givers.slice(hosts=0, gpus=0).size_of.call_one(kept.slice(hosts=1, gpus=1)).get(TIMEOUT) == TOO_LARGE


def test_a_message_to_a_channel_and_a_concurrent_result_are_refused_too(job: ProcessJob, procs: Any) -> None:
    sender = procs.spawn("sender", Giver).slice(hosts=1, gpus=1)
    port, receiver = Channel.open()
    with little_arrives(job):
        assert "the message has 268.4 MB" in sender.send.call_one(port, TOO_LARGE).get(TIMEOUT)
    assert sender.send.call_one(port, FITS).get(TIMEOUT) == "sent"
    assert len(receiver.recv().get(TIMEOUT)) == FITS
    giver = procs.spawn("concurrent", ConcurrentGiver).slice(hosts=0, gpus=0)
    with little_arrives(job), pytest.raises(ActorError, match=r"MemoryError: the message has 268\.4 MB"):
        giver.give.call_one(TOO_LARGE).get(TIMEOUT)
    assert len(giver.give.call_one(FITS).get(TIMEOUT)) == FITS


def test_arguments_too_large_for_the_engine_fail_their_call_alone(
    job: ProcessJob, procs: Any, printed: Printed
) -> None:
    takers = procs.spawn("arguments", Giver)
    port, receiver = Channel.open()
    refusal = r"268\.4 MB, .* room for 16\.8 MB\. .*job\.remote_mount"
    with little_arrives(job):
        refused = takers.size_of.call(bytes(TOO_LARGE))
        following = takers.size_of.call(bytes(FITS // 2))
        with pytest.raises(InvalidRequestError, match=refusal):
            refused.get(TIMEOUT)
        assert set(following.get(TIMEOUT).values()) == {FITS // 2}
        port.send(bytes(TOO_LARGE))
        port.send("small")
        assert receiver.recv().get(TIMEOUT) == "small"
        takers.size_of.broadcast(bytes(TOO_LARGE))
        takers.size_of.call(b"").get(TIMEOUT)
    whats = ("a channel", "size_of")
    wait_for(lambda: all(f"a message to {what} was dropped: " in printed.err for what in whats), "both notices")


def test_results_that_a_slow_driver_does_not_take_fail_before_they_fill_the_engine(job: ProcessJob, procs: Any) -> None:
    giver, size, count = procs.spawn("eager", Giver).slice(hosts=0, gpus=0), 6 * MB, 40
    assert len(giver.give.call_one(size).get(TIMEOUT)) == size
    before = peak(engine_of(job))
    with reading_nothing(job):
        futures = [giver.give.call_one(size) for _ in range(count)]
        wait_for(lambda: ended_calls(job, "eager") > count, "the engine has all results")
    values: list[Any] = []
    for future in futures:
        try:
            values.append(len(future.get(TIMEOUT)))
        except InvalidRequestError as error:
            values.append(str(error))
    refusals = [value for value in values if value != size]
    assert 1 <= len(values) - len(refusals) <= 10
    refusal = r"the result has 6\.3 MB, .* MESHGATE_VALUE_MEMORY=33554432 .* wait for the driver, .*keep\(\)"
    assert all(re.match(refusal, each) for each in refusals)
    assert peak(engine_of(job)) < before + 3 * LIMIT
    assert len(giver.give.call_one(size).get(TIMEOUT)) == size


def test_a_large_message_is_pickled_once(procs: Any) -> None:
    giver = procs.slice(hosts=0, gpus=0).spawn("counting", Giver)
    port, receiver = Channel.open()
    assert giver.count_pickles.call_one(port).get(timeout=TIMEOUT) == 1
    assert receiver.recv().get(timeout=TIMEOUT) == bytes(8 * MB)
