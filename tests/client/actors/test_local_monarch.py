"""A laptop with torchmonarch: which functions of ``monarch.actor`` work with a session, and which are refused."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import monarch.actor
import pytest
from monarch.rdma import RDMAAction, RDMABuffer

from meshgate.actors.local_monarch import equal_from_both_sides
from meshgate.errors import InvalidRequestError
from meshgate.proxies.client import Channel, Client
from meshgate.shapes.shape import Extent, Point
from meshgate_wire.messages import Call, SendTo
from tests.client.counting import Counter
from tests.client.laptop import run_without
from tests.client.scripted_gateway import ScriptedGateway

LOCAL: list[Callable[[], Any]] = [
    monarch.actor.this_host,
    monarch.actor.this_proc,
    monarch.actor.context,
    monarch.actor.Channel.open,
    lambda: monarch.actor.get_or_spawn_controller("one", Counter),
]


EXTENT, OTHER_EXTENT = (["hosts", "gpus"], [2, 3]), (["hosts", "gpus"], [3, 2])


@pytest.mark.parametrize("call", LOCAL)
def test_what_would_start_a_monarch_on_the_laptop_is_refused_while_a_session_is_open(
    call: Callable[[], Any], client: Client
) -> None:
    with pytest.raises(InvalidRequestError, match="Import Channel and get_or_spawn_controller from meshgate"):
        call()


def test_rdma_buffers_of_the_program_are_refused_with_what_to_do_instead(client: Client) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in (lambda: RDMABuffer(memoryview(bytearray(8))), lambda: RDMAAction().submit()):
            with pytest.raises(InvalidRequestError, match="Create it in an endpoint, from memory of the actor"):
                call()


def test_as_endpoint_and_send_of_monarch_work_with_meshes_and_ports_of_a_session(
    gateway: ScriptedGateway, client: Client
) -> None:
    gateway.functions.update(plain=lambda rank, value: value + rank, add=lambda rank, value: value)
    counters: Any = client.attach_hosts("workers", 2).spawn_procs().spawn("counters", Counter)
    port, _ = Channel.open(client=client)
    send: Any = monarch.actor.send
    send(counters.add, (1,), {}, port)
    send(counters.add, (2,), {}, selection="choose")
    assert monarch.actor.as_endpoint(counters.plain).call(5).get(timeout=20).values() == [5, 6]
    assert [(header.endpoint, header.adverb) for header in gateway.got(Call)] == [("add", "choose"), ("plain", "call")]
    assert len(gateway.got(SendTo)) == 1


def test_a_program_beside_a_monarch_of_its_own_still_works_with_the_session() -> None:
    code = """
        import monarch.actor
        import meshgate
        from meshgate.actors.api import inside_actor
        assert not inside_actor()
        monarch.actor.context()
        assert not inside_actor()
        try:
            meshgate.Channel.open()
        except meshgate.GatewayError as error:
            print(error)
        monarch.actor.shutdown_context().get()
    """
    assert b"there is no session" in run_without(code=code)


def test_a_port_of_a_monarch_on_the_laptop_is_refused_before_it_is_sent() -> None:
    code = """
        from monarch.actor import Channel, shutdown_context
        from meshgate.errors import InvalidRequestError
        from meshgate.serialization.pickling import dumps_call
        port, receiver = Channel.open()
        try:
            dumps_call(({"port": [port]},), {})
        except InvalidRequestError as error:
            print(error)
        shutdown_context().get()
    """
    assert b"this Port belongs to a Monarch on this machine" in run_without(code=code)


@pytest.fixture(params=["once", "twice"])
def _compared(request: pytest.FixtureRequest) -> None:
    equal_from_both_sides()
    if request.param == "twice":
        equal_from_both_sides()


@pytest.mark.usefixtures("_compared")
@pytest.mark.parametrize("extent", [EXTENT, OTHER_EXTENT])
@pytest.mark.parametrize("rank", [1, 2])
def test_points_and_extents_of_both_sides_compare_alike(extent: tuple[list[str], list[int]], rank: int) -> None:
    equal = extent == EXTENT
    ours, theirs = Extent(*EXTENT), monarch.actor.Extent(*extent)
    assert operator.eq(ours, theirs) == operator.eq(theirs, ours) == equal
    our_point, their_point = Point(1, ours), monarch.actor.Point(rank, theirs)
    assert operator.eq(our_point, their_point) == operator.eq(their_point, our_point) == (equal and rank == 1)
    assert operator.ne(their_point, our_point) != operator.eq(their_point, our_point)


@pytest.mark.usefixtures("_compared")
def test_monarchs_own_comparison_is_unchanged() -> None:
    theirs: Any = monarch.actor.Extent(*EXTENT)
    assert theirs == monarch.actor.Extent(*EXTENT)
    assert theirs != monarch.actor.Extent(*OTHER_EXTENT)
    assert monarch.actor.Point(1, theirs) == monarch.actor.Point(1, theirs)
    assert theirs != "text"
    with pytest.raises(TypeError, match="unhashable"):
        hash(theirs)
