"""Values live as long as a reference to them, in the driver or in an actor."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from meshgate import ActorError, Channel, ProcessJob, job_load, send
from tests.end_to_end.keepers import Buffer, Maker
from tests.end_to_end.test_kept_values import TIMEOUT, counts
from tests.end_to_end.test_server_restart import kill_server
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def makers(hosts: Any) -> Any:
    return hosts.spawn_procs(name="made").spawn("makers", Maker)


@pytest.fixture(scope="module")
def buffers(hosts: Any) -> list[Any]:
    """Two, in two processes."""
    spawned = hosts.spawn_procs(name="buffering").spawn("buffers", Buffer)
    return [spawned.slice(hosts=rank) for rank in range(2)]


def await_release(makers: Any) -> None:
    """Returns once the gateway knows what the program has let go of."""
    gc.collect()
    makers.make.keep(1).info(TIMEOUT)


def has_none(buffer: Any) -> bool:
    found: dict[str, int] = buffer.known.call_one().get(TIMEOUT)
    return not any(found.values())


def nothing_is_kept(makers: Any) -> bool:
    gc.collect()
    return counts(makers) == {(0, 0)}


def test_a_value_lives_as_long_as_an_actor_has_a_reference_to_it(makers: Any, buffers: list[Any]) -> None:
    first, second = buffers
    made = makers.make.keep(10)
    for buffer in buffers:
        buffer.add.call_one(made.slice(hosts=1).ref()).get(TIMEOUT)
    del made
    await_release(makers)
    assert [buffer.first_byte.call_one().get(TIMEOUT) for buffer in buffers] == [1, 1]
    first.clear.call_one().get(TIMEOUT)
    wait_for(lambda: has_none(first), "the references to be dropped")
    assert second.first_byte.call_one().get(TIMEOUT) == 1
    second.clear.call_one().get(TIMEOUT)
    wait_for(lambda: nothing_is_kept(makers), "the values to be dropped")
    assert has_none(second)


def test_a_reference_can_be_handed_over_in_every_way(makers: Any, buffers: list[Any]) -> None:
    first, second = buffers
    made = makers.make.keep(10)
    first.add.call_one(made.slice(hosts=1).ref()).get(TIMEOUT)
    del made
    port = second.open.call_one().get(TIMEOUT)

    def is_now_with(holder: Any, other: Any) -> None:
        wait_for(lambda: has_none(other), "the references to be dropped")
        await_release(makers)
        assert holder.first_byte.call_one().get(TIMEOUT) == 1

    first.push.call_one(second).get(TIMEOUT)
    is_now_with(second, first)
    first.pull.call_one(second).get(TIMEOUT)
    is_now_with(first, second)
    waiting = second.wait.call_one(0.2)  # before it gets the next message
    first.push_without_waiting.call_one(second).get(TIMEOUT)
    waiting.get(TIMEOUT)
    is_now_with(second, first)
    first.pull.call_one(second).get(TIMEOUT)
    first.send_to.call_one(port).get(TIMEOUT)
    second.receive.call_one().get(TIMEOUT)
    is_now_with(second, first)
    second.clear.call_one().get(TIMEOUT)
    wait_for(lambda: nothing_is_kept(makers), "the values to be dropped")
    assert has_none(second)


def test_a_message_without_an_answer_keeps_what_it_refers_to(makers: Any, buffers: list[Any], hosts: Any) -> None:
    buffer = buffers[0]
    port = buffer.open.call_one().get(TIMEOUT)
    own, _ = Channel.open()

    def sent_while_it_waits(how: Any) -> None:
        buffer.wait.broadcast(0.2)
        how(makers.make.keep(10).slice(hosts=1))
        await_release(makers)
        assert buffer.first_byte.call_one().get(TIMEOUT) == 1
        buffer.clear.call_one().get(TIMEOUT)

    sent_while_it_waits(lambda one: buffer.add.broadcast(one.ref()))
    sent_while_it_waits(lambda one: send(buffer.add, (one.ref(),), {}, own))
    port.send(makers.make.keep(10).slice(hosts=1).ref())
    await_release(makers)
    buffer.receive.call_one().get(TIMEOUT)
    assert buffer.first_byte.call_one().get(TIMEOUT) == 1
    buffer.clear.call_one().get(TIMEOUT)
    spawned = hosts.spawn_procs(name="new").spawn("new", Buffer, makers.make.keep(10).ref())
    await_release(makers)
    assert list(spawned.first_byte.call().get(TIMEOUT).values()) == [0, 1]
    spawned.clear.call().get(TIMEOUT)
    wait_for(lambda: nothing_is_kept(makers), "the values to be dropped")
    assert has_none(buffer)


def test_a_process_that_dies_has_no_references_any_more(makers: Any, hosts: Any) -> None:
    mortal = hosts.spawn_procs(name="mortal").spawn("mortal", Buffer)
    mortal.add.call(makers.make.keep(10).ref()).get(TIMEOUT)
    await_release(makers)
    assert list(mortal.first_byte.call().get(TIMEOUT).values()) == [0, 1]
    mortal.die.broadcast()
    wait_for(lambda: nothing_is_kept(makers), "the values to be dropped")


def test_values_that_are_released_go_although_an_actor_refers_to_them(makers: Any, buffers: list[Any]) -> None:
    buffer = buffers[0]
    made = makers.make.keep(10)
    buffer.add.call_one(made.slice(hosts=1).ref()).get(TIMEOUT)
    made.release()
    wait_for(lambda: nothing_is_kept(makers), "the values to be dropped")
    with pytest.raises(ActorError, match=r"the value of makers\.make\.keep\(\) on rank 1: it was released"):
        buffer.first_byte.call_one().get(TIMEOUT)
    buffer.clear.call_one().get(TIMEOUT)


def test_nothing_is_left_of_a_thousand_references_that_were_passed_on(makers: Any, buffers: list[Any]) -> None:
    first, second = buffers
    for _ in range(10):
        first.add.call_one(makers.make.keep(10).slice(hosts=0).ref())
    first.play.call_one(second, 500).get(TIMEOUT)  # each round passes one on and gets one back
    assert first.first_byte.call_one().get(TIMEOUT) == 0
    first.clear.call_one().get(TIMEOUT)
    wait_for(lambda: nothing_is_kept(makers), "the values to be dropped")
    wait_for(lambda: has_none(first) and has_none(second), "the references to be dropped")


def test_references_outlive_a_driver_and_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with ProcessJob({"workers": 1}) as job:
        hosts = job.state(cached_path=None).workers
        makers = hosts.spawn_procs(name="made").spawn("makers", Maker)
        buffers = hosts.spawn_procs(name="buffering").spawn("buffers", Buffer)
        buffers.add.call(makers.make.keep(10).ref()).get(TIMEOUT)
        makers.make.keep(20).info(TIMEOUT)
        kill_server(job)
        await_release(makers)
        job.detach("kept")
        next_job: Any = job_load(str(tmp_path / ".monarch" / "job_state.pkl"))
        try:
            session = next_job.attach()
            wait_for(lambda: counts(session["makers"]) == {(1, 0)}, "the values to be dropped")
            assert session["buffers"].first_byte.call_one().get(TIMEOUT) == 0
            session["buffers"].clear.call_one().get(TIMEOUT)
            wait_for(lambda: counts(session["makers"]) == {(0, 0)}, "the values to be dropped")
        finally:
            next_job._client.close()
            job.kill()
