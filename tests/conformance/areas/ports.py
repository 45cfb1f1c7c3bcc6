"""Channels: ports passed to actors, and what their receivers get."""

from __future__ import annotations

from tests.conformance.actors import Asking, CustomError, Ports
from tests.conformance.cases import Kit, raises


def values_arrive_in_the_order_sent(kit: Kit) -> None:
    port, receiver = kit.api.Channel.open()
    kit.one(Ports).send.call_one(port, [1, "two", None]).get()
    assert [receiver.recv().get() for _ in range(3)] == [1, "two", None]


def every_rank_can_send_to_one_port(kit: Kit) -> None:
    port, receiver = kit.api.Channel.open()
    kit.spawn(Ports).send_rank.broadcast(port)
    assert sorted(receiver.recv().get() for _ in range(4)) == [0, 1, 2, 3]


def an_exception_sent_to_a_port_is_raised_by_recv(kit: Kit) -> None:
    port, receiver = kit.api.Channel.open()
    kit.one(Ports).send_exception.broadcast(port, "sent")
    error = raises(CustomError, lambda: receiver.recv().get())
    assert error.args[0] == "sent"


def a_channel_for_one_value(kit: Kit) -> None:
    port, receiver = kit.api.Channel.open(once=True)
    kit.one(Ports).send.broadcast(port, [5])
    assert receiver.recv().get() == 5


def recv_times_out_and_can_be_repeated(kit: Kit) -> None:
    port, receiver = kit.api.Channel.open()
    waiting = receiver.recv()
    raises(TimeoutError, lambda: waiting.get(timeout=0.2))
    kit.one(Ports).send.broadcast(port, [6])
    assert waiting.get(timeout=30) == 6


def the_program_sends_to_its_own_port(kit: Kit) -> None:
    port, receiver = kit.api.Channel.open()
    port.send({"own": 1})
    assert receiver.recv().get() == {"own": 1}


def actors_talk_through_ports_of_their_own(kit: Kit) -> None:
    asking, answering = kit.one(Asking), kit.one(Ports)
    assert asking.ask.call_one(answering, "hello").get() == "hello"
