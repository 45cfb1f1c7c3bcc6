"""Ordinary use of a driver, through a real gateway and real Monarch."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshgate as kt
from meshgate import Accumulator, ActorError, Channel, FutureProxy, SupervisionError, ValueMesh, current_client
from tests.end_to_end.actors import (
    Async,
    FailingInit,
    OpensAChannel,
    Point2,
    Ported,
    PortedToMeshgate,
    RaisesLocks,
    Ranked,
    SendsMeshes,
    Sharing,
    UserError,
    Worker,
)
from tests.waiting import wait_for


def test_call_returns_a_value_for_each_rank(workers: Any) -> None:
    values = workers.rank.call().get()
    assert isinstance(values, ValueMesh)
    assert list(values.values()) == [0, 1, 2, 3]
    assert values.item(hosts=1, gpus=0) == 2
    assert dict(values.extent) == {"hosts": 2, "gpus": 2}


def test_a_slice_calls_exactly_its_ranks(procs: Any) -> None:
    workers = procs.spawn("sliced", Worker)
    workers.slice(hosts=1).add.call(5).get()
    workers.slice(gpus=slice(1, 2)).add.call(7).get()
    assert list(workers.add.call(0).get().values()) == [0, 7, 5, 12]
    assert workers.slice(hosts=0, gpus=1).coordinates.call_one().get() == {}
    assert workers.flatten("rank").slice(rank=slice(0, 4, 3)).add.call(0).get().item(rank=1) == 12


def test_an_actor_has_a_rank_attribute_that_it_may_set(procs: Any) -> None:
    ranked = procs.spawn("ranked", Ranked)
    assert list(ranked.rank_attribute.call().get().values()) == [0, 1, 2, 3]
    assert ranked.slice(hosts=1, gpus=1).rank_attribute.call_one().get() == 3
    assert set(procs.spawn("named", Ranked, named=True).rank_attribute.call().get().values()) == {"mine"}


class FrozenObjects:
    """Arrives as the number of objects that garbage collections skip in the process that receives it."""

    def __reduce__(self) -> Any:
        return gc.get_freeze_count, ()


def test_garbage_collections_in_a_process_skip_what_monarch_has_imported(workers: Any) -> None:
    assert min(workers.echo.call(FrozenObjects()).get().values()) > 10_000


def test_choose_and_broadcast_and_stream(procs: Any) -> None:
    workers = procs.spawn("adverbs", Worker)
    assert {workers.rank.choose().get() for _ in range(60)} == {0, 1, 2, 3}
    assert workers.slice(hosts=1).coordinates.choose().get() in ({"gpus": 0}, {"gpus": 1})
    workers.add.broadcast(3)
    assert sorted(future.get() for future in workers.add.stream(1)) == [4, 4, 4, 4]


def test_calls_to_one_actor_keep_their_order(procs: Any) -> None:
    worker = procs.spawn("ordered", Worker).slice(hosts=0, gpus=0)
    futures = [worker.record.call_one(number) for number in range(500)]
    assert [future.get() for future in futures] == list(range(500))
    assert worker.recorded.call_one().get() == list(range(500))


def test_a_future_can_be_awaited_from_any_loop(workers: Any) -> None:
    async def gathered() -> list[Any]:
        return await asyncio.gather(*(workers.echo.call_one(n) for n in ()), workers.rank.call())

    first, second = asyncio.run(gathered()), asyncio.run(gathered())
    assert list(first[0].values()) == list(second[0].values()) == [0, 1, 2, 3]


def test_many_threads_call_concurrently(workers: Any) -> None:
    one = workers.slice(hosts=0, gpus=0)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda n: one.echo.call_one(n).get(), range(200))) == list(range(200))


def test_a_timeout_leaves_the_future_usable(workers: Any, tmp_path: Path) -> None:
    path = tmp_path / "go"
    future: FutureProxy[Any] = workers.wait_on.call([0], str(path))
    with pytest.raises(TimeoutError):
        future.get(timeout=0)
    path.touch()
    assert list(future.get(timeout=30).values()) == [None] * 4


def test_async_actors_and_explicit_ports(procs: Any) -> None:
    assert list(procs.spawn("async", Async).echo.call("x").get().values()) == ["x"] * 4
    assert list(procs.spawn("ported", Ported).increment.call(41).get().values()) == [42] * 4


def test_actors_send_to_a_channel_for_one_message(procs: Any) -> None:
    actors = procs.spawn("opens", OpensAChannel)
    asking, asked = actors.slice(hosts=0, gpus=0), actors.slice(hosts=1, gpus=0)
    assert asking.ask.call_one(asked).get(timeout=60) == "the only message"


def test_values_of_user_defined_types_are_returned(workers: Any) -> None:
    assert list(workers.echo.call(Point2(3)).get().values()) == [Point2(3)] * 4
    assert workers.slice(hosts=0, gpus=0).echo.call_one(Point2).get() is Point2


def test_a_class_of_a_script_is_pickled_by_value(procs: Any) -> None:
    namespace: dict[str, Any] = {"kt": kt, "__name__": "__main__"}
    exec(
        "class Local(kt.Actor):\n"
        "    def __init__(self, base): self.base = base\n"
        "    @kt.endpoint\n"
        "    def plus(self, n): return self.base + n\n",
        namespace,
    )
    assert list(procs.spawn("local", namespace["Local"], 40).plus.call(2).get().values()) == [42] * 4


@pytest.mark.parametrize("length", [10, 5_000, 3_000_000])
def test_arrays_are_sent_and_returned(workers: Any, length: int) -> None:
    array = np.arange(length, dtype=np.float64)
    (doubled,) = workers.slice(hosts=0, gpus=0).doubled.stream(array)
    np.testing.assert_array_equal(doubled.get(), np.arange(length) * 2)
    assert array[1] == 1  # the laptop's array is unchanged


def test_an_array_is_copied_at_the_call(workers: Any) -> None:
    array = np.zeros(1_000_000)
    future = workers.slice(hosts=0, gpus=0).echo.call_one(array)
    array[:] = 1
    assert not future.get().any()


def test_a_mesh_in_an_argument_is_the_real_mesh(procs: Any) -> None:
    callers, others = procs.spawn("callers", Worker), procs.spawn("others", Worker, 10)
    one = callers.slice(hosts=0, gpus=0)
    assert one.type_of.call_one(others).get() == "monarch._src.actor.actor_mesh.ActorMesh"
    assert one.type_of.call_one(procs).get() == "monarch._src.actor.proc_mesh.ProcMesh"
    assert one.call_others.call_one(others.slice(hosts=1), 5).get() == [15, 15]
    assert list(others.add.call(0).get().values()) == [10, 10, 15, 15]


def test_a_returned_mesh_is_a_proxy(workers: Any, procs: Any) -> None:
    returned = procs.spawn("returned", Worker, 7)
    proxy = workers.slice(hosts=0, gpus=0).return_mesh.call_one(returned).get()
    assert list(proxy.add.call(1).get().values()) == [8, 8, 8, 8]
    part = workers.slice(hosts=0, gpus=0).return_mesh.call_one(returned.slice(hosts=1)).get()
    assert list(part.add.call(1).get().values()) == [9, 9]


def test_messages_on_a_channel_arrive_in_order(workers: Any) -> None:
    port, receiver = Channel.open()
    workers.slice(hosts=0, gpus=0).send_to.call_one(port, 50).get()
    assert [receiver.recv().get(timeout=30) for _ in range(50)] == list(range(50))


def test_a_slow_receiver_gets_every_message_in_order_and_can_call_meanwhile(workers: Any) -> None:
    port, receiver = Channel.open()
    worker = workers.slice(hosts=0, gpus=0)
    worker.send_to.call_one(port, 400, size=100_000).get(timeout=60)
    assert worker.rank.call_one().get(timeout=60) == 0
    assert [receiver.recv().get(timeout=60)[0] for _ in range(400)] == list(range(400))


def test_an_accumulator_folds_the_replies(workers: Any) -> None:
    total = Accumulator(workers.rank, 0, lambda left, right: left + right)
    assert total.accumulate().get() == 6


def test_a_remote_exception_keeps_its_type_and_names_host_and_file(workers: Any) -> None:
    with pytest.raises(ActorError) as caught:
        workers.slice(hosts=1, gpus=1).fail.call_one("not now").get()
    assert isinstance(caught.value.__cause__, UserError)
    text = str(caught.value)
    assert "not now" in text
    assert "workers-1" in text
    assert "actors.py" in text


def test_an_exception_that_cannot_be_pickled_is_reported_and_its_actor_lives(procs: Any) -> None:
    actors = procs.spawn("locks", RaisesLocks)
    with pytest.raises(ActorError, match="the optimizer is busy") as caught:
        actors.fail.call().get(timeout=60)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "HoldsALock: the optimizer is busy" in str(caught.value.__cause__)
    assert "cannot pickle '_thread.lock' object" in str(caught.value.__cause__)
    assert "actors.py" in str(caught.value)
    with pytest.raises(RuntimeError, match="HoldsALock: the loader is busy"):
        actors.fail_through_port.choose().get(timeout=60)
    assert set(actors.state.call().get(timeout=60).values()) == {"alive"}


def test_the_same_error_of_many_ranks_is_reported_once(workers: Any) -> None:
    def are_counted() -> bool:
        """An error is reported 0.25 s after the first rank has failed, with those that have failed by then."""
        with pytest.raises(ActorError) as caught:
            workers.fail_if.call([0, 1, 3]).get()
        return "3 of 4 ranks failed" in str(caught.value)

    wait_for(are_counted, "three ranks that fail together", timeout=60)
    assert list(workers.fail_if.call([]).get().values()) == [0, 1, 2, 3]


def test_invalid_arguments_and_unknown_endpoints_raise_at_the_call(workers: Any) -> None:
    with pytest.raises(TypeError):
        workers.add.call()
    with pytest.raises(AttributeError):
        workers.no_such_endpoint  # noqa: B018
    with pytest.raises(kt.UnpicklableArgument, match=r"'value'.*lock at \['key'\]\[0\]"):
        workers.echo.call({"key": [threading.Lock()]})
    with pytest.raises(IndexError):
        workers.slice(hosts=7)


def test_the_error_of_a_constructor_is_reported(procs: Any) -> None:
    with pytest.raises((SupervisionError, kt.StepFailedError), match="not today"):
        procs.spawn("failing", FailingInit).ping.call().get(timeout=60)


def test_two_drivers_share_one_gateway(job: Any, hosts: Any) -> None:
    with kt.Client(kt.UrlDialer(job.gateway_url, job._gateway.record.token)) as other:
        workers = other.attach_hosts("workers", 2).spawn_procs(per_host={"gpus": 1}).spawn("others", Worker, 100)
        assert list(workers.add.call(1).get().values()) == [101, 101]


def test_stopped_meshes_are_released_and_their_last_lines_arrive(
    hosts: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    client, host = current_client(), hosts.slice(hosts=0)
    gc.collect()
    before = len(client.objects)
    for number in range(3):
        procs = host.spawn_procs()
        stopped = procs.spawn("passing", Worker)
        stopped.say.call(f"line {number} of many").get(timeout=60)
        procs.stop().get(timeout=60)
        del procs, stopped
    gc.collect()
    assert len(client.objects) <= before
    assert host.spawn_procs().spawn("after", Worker).rank.call().get(timeout=60).values()
    out = capsys.readouterr().out
    assert [f"line {number} of many" in out for number in range(3)] == [True] * 3


def test_meshes_arrive_through_ports(hosts: Any) -> None:
    port, receiver = Channel[Any].open()
    procs = hosts.slice(hosts=0).spawn_procs()
    sender = procs.spawn("sender", SendsMeshes, procs, port)
    inner = receiver.recv().get(timeout=120)
    assert inner.add.call_one(2).get(timeout=120) == 7
    sender.send.call_one(procs, port).get(timeout=120)
    first, second = receiver.recv().get(timeout=120)
    assert first.spawn("again", Worker, 1).add.call_one(1).get(timeout=120) == 2
    assert second.size() == 1
    sender.send.call_one(hosts.slice(hosts=1), port).get(timeout=120)
    host = receiver.recv().get(timeout=120)[0]
    assert host.spawn("other", Worker, 2).add.call_one(1).get(timeout=120) == 3
    procs.stop().get(timeout=120)


def test_meshgates_names_work_inside_actors(hosts: Any, workers: Any) -> None:
    ported = hosts.slice(hosts=0).spawn("ported", PortedToMeshgate)
    assert ported.sum_of.call_one(workers).get(timeout=120) == 6
    assert ported.first_reply.call_one(workers).get(timeout=120) in range(4)
    assert "ported" in ported.later.call_one().get(timeout=120)
    assert "caught" in ported.caught.call_one(workers.slice(hosts=0, gpus=0)).get(timeout=120)


def test_a_controller_is_the_same_for_the_driver_and_for_actors_and_runs_on_a_host(hosts: Any) -> None:
    sharing = hosts.spawn_procs().spawn("sharing", Sharing)
    totals = dict(sharing.add.call("shared", 1).get(timeout=60).values())
    assert set(totals) == {101, 102}
    shared: Any = kt.get_or_spawn_controller("shared", Worker, start=7).get(timeout=60)
    assert shared.add.call_one(1).get(timeout=60) == 103
    assert {shared.pid.call_one().get(timeout=60)} == set(totals.values())
    other: Any = kt.get_or_spawn_controller("other", Worker, start=7).get(timeout=60)
    assert other.add.call_one(1).get(timeout=60) == 8
    with pytest.raises(ValueError, match="must subclass"):
        kt.get_or_spawn_controller("none", dict)
