"""What a driver does all day, through a real gateway, against real Monarch."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import meshgate as kt
from meshgate import Accumulator, ActorError, Channel, FutureProxy, SupervisionError, ValueMesh, current_client
from tests.end_to_end.actors import Async, Point2, Ported, Ranked, Refused, Refusing, Worker


def test_call_gives_a_value_for_each_rank(workers: Any) -> None:
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


def test_an_actor_has_its_rank_and_may_set_another(procs: Any) -> None:
    ranked = procs.spawn("ranked", Ranked)
    assert list(ranked.own.call().get().values()) == [0, 1, 2, 3]
    assert ranked.slice(hosts=1, gpus=1).own.call_one().get() == 3
    assert set(procs.spawn("named", Ranked, named=True).own.call().get().values()) == {"mine"}


def test_choose_and_broadcast_and_stream(procs: Any) -> None:
    workers = procs.spawn("adverbs", Worker)
    assert workers.rank.choose().get() in range(4)
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


def test_many_threads_call_at_once(workers: Any) -> None:
    one = workers.slice(hosts=0, gpus=0)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda n: one.echo.call_one(n).get(), range(200))) == list(range(200))


def test_a_timeout_consumes_nothing(workers: Any) -> None:
    future: FutureProxy[Any] = workers.rank.call()
    with pytest.raises(TimeoutError):
        future.get(timeout=0)
    assert list(future.get(timeout=30).values()) == [0, 1, 2, 3]


def test_async_actors_and_explicit_ports(procs: Any) -> None:
    assert list(procs.spawn("async", Async).echo.call("x").get().values()) == ["x"] * 4
    assert list(procs.spawn("ported", Ported).answer.call(41).get().values()) == [42] * 4


def test_values_of_the_users_own_types_come_back_as_themselves(workers: Any) -> None:
    assert list(workers.echo.call(Point2(3)).get().values()) == [Point2(3)] * 4
    assert workers.slice(hosts=0, gpus=0).echo.call_one(Point2).get() is Point2


def test_a_class_of_a_script_travels_by_value(procs: Any) -> None:
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
def test_arrays_go_and_come_back(workers: Any, length: int) -> None:
    array = np.arange(length, dtype=np.float64)
    (doubled,) = workers.slice(hosts=0, gpus=0).doubled.stream(array)
    np.testing.assert_array_equal(doubled.get(), np.arange(length) * 2)
    assert array[1] == 1  # the laptop's own is as it was


def test_an_array_is_sent_as_it_was_at_the_call(workers: Any) -> None:
    array = np.zeros(1_000_000)
    future = workers.slice(hosts=0, gpus=0).echo.call_one(array)
    array[:] = 1
    assert not future.get().any()


def test_a_mesh_as_an_argument_is_the_real_mesh(procs: Any) -> None:
    callers, others = procs.spawn("callers", Worker), procs.spawn("others", Worker, 10)
    one = callers.slice(hosts=0, gpus=0)
    assert one.type_of.call_one(others).get() == "monarch._src.actor.actor_mesh.ActorMesh"
    assert one.type_of.call_one(procs).get() == "monarch._src.actor.proc_mesh.ProcMesh"
    assert one.call_others.call_one(others.slice(hosts=1), 5).get() == [15, 15]
    assert list(others.add.call(0).get().values()) == [10, 10, 15, 15]


def test_a_mesh_that_an_endpoint_returns_is_a_proxy(workers: Any, procs: Any) -> None:
    given = procs.spawn("given", Worker, 7)
    back = workers.slice(hosts=0, gpus=0).give.call_one(given).get()
    assert list(back.add.call(1).get().values()) == [8, 8, 8, 8]
    part = workers.slice(hosts=0, gpus=0).give.call_one(given.slice(hosts=1)).get()
    assert list(part.add.call(1).get().values()) == [9, 9]


def test_what_actors_send_to_a_channel_is_received_in_order(workers: Any) -> None:
    port, receiver = Channel.open()
    workers.slice(hosts=0, gpus=0).send_to.call_one(port, 50).get()
    assert [receiver.recv().get(timeout=30) for _ in range(50)] == list(range(50))


def test_a_program_that_reads_late_gets_every_message_in_order_and_can_call_meanwhile(workers: Any) -> None:
    port, receiver = Channel.open()
    worker = workers.slice(hosts=0, gpus=0)
    worker.send_to.call_one(port, 400, size=100_000).get(timeout=60)
    assert worker.rank.call_one().get(timeout=60) == 0
    assert [receiver.recv().get(timeout=60)[0] for _ in range(400)] == list(range(400))


def test_an_accumulator_folds_the_answers(workers: Any) -> None:
    total = Accumulator(workers.rank, 0, lambda left, right: left + right)
    assert total.accumulate().get() == 6


def test_a_remote_exception_keeps_its_type_and_says_where(workers: Any) -> None:
    with pytest.raises(ActorError) as caught:
        workers.slice(hosts=1, gpus=1).fail.call_one("not now").get()
    assert isinstance(caught.value.__cause__, Refused)
    text = str(caught.value)
    assert "not now" in text
    assert "workers-1" in text
    assert "actors.py" in text


def test_the_same_error_of_many_ranks_is_told_once(workers: Any) -> None:
    with pytest.raises(ActorError) as caught:
        workers.fail_if.call([0, 1, 3]).get()
    assert "3 of 4 ranks failed" in str(caught.value)
    assert list(workers.fail_if.call([]).get().values()) == [0, 1, 2, 3]


def test_wrong_arguments_and_unknown_endpoints_raise_at_the_call(workers: Any) -> None:
    with pytest.raises(TypeError):
        workers.add.call()
    with pytest.raises(AttributeError):
        workers.nothing_like_it  # noqa: B018
    with pytest.raises(kt.UnpicklableArgument, match=r"'value'.*lock at \['key'\]\[0\]"):
        workers.echo.call({"key": [threading.Lock()]})
    with pytest.raises(IndexError):
        workers.slice(hosts=7)


def test_a_constructor_that_raises_is_told_with_its_traceback(procs: Any) -> None:
    with pytest.raises((SupervisionError, kt.StepFailedError), match="not today"):
        procs.spawn("refusing", Refusing).ping.call().get(timeout=60)


def test_two_drivers_use_one_gateway(job: Any, hosts: Any) -> None:
    with kt.Client(kt.UrlDialer(job.gateway_url, job._gateway.record.token)) as other:
        theirs = other.attach_hosts("workers", 2).spawn_procs(per_host={"gpus": 1}).spawn("theirs", Worker, 100)
        assert list(theirs.add.call(1).get().values()) == [101, 101]


def test_meshes_that_were_spawned_and_stopped_are_let_go_and_their_last_lines_arrive(
    hosts: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    client = current_client()
    gc.collect()
    before = len(client.objects)
    for number in range(3):
        procs = hosts.spawn_procs()
        stopped = procs.spawn("passing", Worker)
        stopped.say.call(f"line {number} of many").get(timeout=60)
        procs.stop().get(timeout=60)
        del procs, stopped
    gc.collect()
    assert len(client.objects) <= before
    assert hosts.spawn_procs().spawn("after", Worker).rank.call().get(timeout=60).values()
    out = capsys.readouterr().out
    assert [f"line {number} of many" in out for number in range(3)] == [True] * 3
