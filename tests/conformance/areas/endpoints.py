"""Calling endpoints: adverbs, arguments, order, kinds of endpoints."""

from __future__ import annotations

from tests.conformance.actors import Asynchronous, Child, Concurrent, Ports, Worker
from tests.conformance.cases import Kit, raises


def call_returns_a_value_for_each_rank(kit: Kit) -> None:
    values = kit.spawn().rank.call().get()
    assert [value for _, value in values.items()] == [0, 1, 2, 3]


def call_one_returns_the_value(kit: Kit) -> None:
    assert kit.one().echo.call_one({"a": [1, 2]}).get() == {"a": [1, 2]}


def call_one_of_several_actors_is_refused(kit: Kit) -> None:
    workers = kit.spawn()
    raises(ValueError, lambda: workers.echo.call_one(1).get())


def choose_asks_one_actor(kit: Kit) -> None:
    assert kit.spawn().rank.choose().get() in range(4)


def broadcast_reaches_every_actor(kit: Kit) -> None:
    workers = kit.spawn()
    workers.note.broadcast(3)
    assert [value for _, value in workers.noted.call().get().items()] == [[3]] * 4


def stream_yields_every_answer(kit: Kit) -> None:
    assert sorted(future.get() for future in kit.spawn().rank.stream()) == [0, 1, 2, 3]


def calls_of_one_caller_run_in_order(kit: Kit) -> None:
    worker = kit.one()
    for number in range(50):
        worker.note.broadcast(number)
    assert worker.noted.call_one().get() == list(range(50))


def constructor_arguments_arrive(kit: Kit) -> None:
    assert kit.one(Worker, 10, step=3).add.call_one(2).get() == 16


def defaults_and_keywords(kit: Kit) -> None:
    worker = kit.one()
    assert worker.add.call_one().get() == 1
    assert worker.add.call_one(amount=2, times=3).get() == 7


def wrong_arguments_raise_type_error_at_the_call(kit: Kit) -> None:
    worker = kit.one()
    raises(TypeError, lambda: worker.add.call_one(1, 2, 3))
    raises(TypeError, lambda: worker.add.call_one(unknown=1))


def an_unknown_endpoint_is_an_attribute_error(kit: Kit) -> None:
    worker = kit.one()
    raises(AttributeError, lambda: worker.no_such_endpoint)


def endpoints_are_inherited_and_overridden(kit: Kit) -> None:
    child = kit.one(Child)
    assert child.echo.call_one(1).get() == ("child", 1)
    assert child.add.call_one(2).get() == 2


def async_endpoints_run_one_at_a_time(kit: Kit) -> None:
    actor = kit.one(Asynchronous)
    futures = [actor.overlap.call_one() for _ in range(4)]
    assert [future.get() for future in futures] == [1, 1, 1, 1]


def concurrent_endpoints_overlap(kit: Kit) -> None:
    actor = kit.one(Concurrent)
    waiting = actor.wait.call_one()
    actor.open.call_one().get()
    assert waiting.get() == "opened"


def an_endpoint_answers_through_its_response_port(kit: Kit) -> None:
    assert kit.one(Ports).answer.call_one("x").get() == ("explicit", "x")


def a_response_port_sends_exceptions(kit: Kit) -> None:
    ports = kit.one(Ports)
    error = raises(ValueError, lambda: ports.answer_exception.call_one("x").get())
    assert str(error) == "x"


def an_actor_knows_its_rank_and_name(kit: Kit) -> None:
    workers = kit.spawn()
    assert [value for _, value in workers.rank_by_context.call().get().items()] == [0, 1, 2, 3]
    assert workers.coordinates.call().get().item(hosts=1, gpus=0) == {"hosts": 1, "gpus": 0}
    assert workers.mesh_sizes.call().get().item(hosts=0, gpus=0) == {"hosts": 2, "gpus": 2}
    assert "worker" in workers.slice(hosts=0, gpus=0).name.call_one().get()


def large_values_travel_both_ways(kit: Kit) -> None:
    data = bytes(range(256)) * 40_000
    assert kit.one().echo.call_one(data).get() == data


def send_calls_with_a_port_of_the_callers(kit: Kit) -> None:
    workers = kit.spawn()
    port, receiver = kit.api.Channel.open()
    kit.api.send(workers.rank, (), {}, port, "all")
    assert sorted(receiver.recv().get() for _ in range(4)) == [0, 1, 2, 3]
