"""What Monarch's documentation shows (getting started, actors, cookbook), with meshgate's imports and job."""

from __future__ import annotations

import operator
from typing import Any

import pytest

from meshgate import Accumulator, ActorError, Channel, ValueMesh, send
from tests.end_to_end.monarch_docs_actors import Counter, Member, PingPong, Registered, Responder


@pytest.fixture(scope="module")
def procs(hosts: Any) -> Any:
    return hosts.slice(hosts=0).spawn_procs(per_host={"gpus": 2})


def test_getting_started_counts(procs: Any) -> None:
    counters = procs.spawn("counters", Counter, 0)
    counters.increment.broadcast()
    counters.slice(gpus=1).increment.call_one(10).get()
    values = counters.get_value.call().get()
    assert isinstance(values, ValueMesh)
    assert [(dict(point), value) for point, value in values.items()] == [({"gpus": 0}, 1), ({"gpus": 1}, 11)]
    assert Accumulator(counters.get_value, 0, operator.add).accumulate().get() == 12
    assert sorted(future.get() for future in counters.get_value.stream()) == [1, 11]
    assert counters.get_value.choose().get() in (1, 11)


def test_two_meshes_call_each_other(hosts: Any, procs: Any) -> None:
    others = hosts.slice(hosts=1).spawn_procs(per_host={"gpus": 2})
    ping, pong = procs.spawn("ping", PingPong, "ping"), others.spawn("pong", PingPong, "pong")
    ping.init.call(pong).get()
    pong.init.call(ping).get()
    assert ping.slice(gpus=0).send.call_one("hi").get() == ["pong 0 got hi from ping", "pong 1 got hi from ping"]
    assert pong.slice(gpus=1).send.call_one("yo").get() == ["ping 0 got yo from pong", "ping 1 got yo from pong"]


def test_the_first_rank_is_found_by_flatten_and_slice(hosts: Any) -> None:
    counters = hosts.spawn_procs(per_host={"gpus": 2}).spawn("counters", Counter, 7)
    assert counters.flatten("rank").slice(rank=0).get_value.call_one().get() == 7


def test_an_actor_calls_a_rank_of_its_own_mesh(procs: Any) -> None:
    members = procs.spawn("members", Member)
    members.set_mesh.call(members).get()
    assert members.slice(gpus=0).ask.call_one(1).get(timeout=120) == 41


def test_results_come_back_later_through_a_port(procs: Any) -> None:
    members = procs.spawn("producers", Member)
    members.set_mesh.call(members).get()
    assert members.slice(gpus=0).collect.call_one(3).get(timeout=120) == [0, 1, 2]


def test_the_program_receives_through_a_channel(procs: Any) -> None:
    port, receiver = Channel[int].open()
    procs.spawn("producers", Member).slice(gpus=1).produce.call_one(port, 3).get()
    assert [receiver.recv().get(timeout=120) for _ in range(3)] == [0, 1, 2]


def test_a_controller_is_shared_by_name(procs: Any) -> None:
    counts = procs.spawn("registered", Registered).register.call().get()
    assert sorted(count for _, count in counts.items()) == [1, 2]


def test_an_endpoint_replies_through_its_port(procs: Any) -> None:
    responders = procs.spawn("responders", Responder)
    assert responders.slice(gpus=0).answer.call_one("who").get() == "who answered"
    port, receiver = Channel[str].open()
    send(responders.answer, ("what",), {}, port=port, selection="all")
    assert [receiver.recv().get(timeout=120) for _ in range(2)] == ["what answered"] * 2


def test_an_error_reaches_the_caller_and_the_actor_goes_on(procs: Any) -> None:
    counter = procs.spawn("counter", Counter).slice(gpus=0)
    with pytest.raises(ActorError, match="unsupported operand"):
        counter.increment.call_one("one").get()
    counter.increment.call_one(2).get()
    assert counter.get_value.call_one().get() == 2
