from __future__ import annotations

import gc
import pickle
from typing import Any

import pytest

from meshgate.client import Client
from meshgate.errors import UnreadableResult
from meshgate.extent import Extent
from meshgate.proxies import ActorMeshProxy, HostMeshProxy
from meshgate.shape import Region, Shape
from meshgate.unpickling import MeshHandle
from meshgate_wire import Fragments
from meshgate_wire.messages import Adopt, Adopted, Call, ErrorGroup, Failure, PortSend, Release, SpawnProcs, stream_of
from tests.client.counting import Counter
from tests.client.fake_gateway import FakeGateway

HOSTS = Extent(["hosts"], [2]).region
PROCS = Extent(["hosts", "gpus"], [2, 2]).region


def ranks(gateway: FakeGateway, number: int, count: int) -> None:
    """Tells the fake gateway what its own object ``number`` is."""
    session = gateway.session()
    gateway.do(lambda: session.ranks.__setitem__(number, list(range(count))))


def settled(client: Client) -> None:
    """Returns once the gateway has read everything that was sent so far."""
    client.attach_hosts("workers", 2).initialized.get(timeout=20)


def test_an_actor_mesh_that_came_back_can_be_called(gateway: FakeGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount: rank + amount
    settled(client)
    ranks(gateway, -1, 4)
    mesh: Any = client.reader.actors(MeshHandle(-1), Counter, "counters", PROCS.as_shape(), None)
    assert isinstance(mesh, ActorMeshProxy)
    assert mesh.add.call(1).get(timeout=20).values() == [1, 2, 3, 4]
    assert mesh.slice(hosts=1).add.call(1).get(timeout=20).values() == [3, 4]
    (adopted,) = gateway.got(Adopt)
    assert (adopted.object, adopted.kind, adopted.name) == (-1, "actors", "counters")
    assert gateway.received.index(adopted) < gateway.received.index(gateway.got(Call)[0])


def test_the_family_of_a_mesh_that_came_back_is_told(gateway: FakeGateway, client: Client) -> None:
    settled(client)
    hosts = client.reader.hosts(MeshHandle(-1), HOSTS)
    procs = client.reader.procs(MeshHandle(-2), hosts, PROCS, PROCS)
    mesh = client.reader.actors(MeshHandle(-3), Counter, "counters", PROCS.as_shape(), procs)
    assert isinstance(hosts, HostMeshProxy)
    assert procs.slice(hosts=1, gpus=0).host_mesh == hosts.slice(hosts=1)
    settled(client)
    parents = [header.parent and header.parent.object for header in gateway.got(Adopt)]
    assert parents == [None, -1, -2]
    assert client.objects.stands_on(mesh._object, hosts._object)


def test_processes_can_be_spawned_on_hosts_that_came_back(gateway: FakeGateway, client: Client) -> None:
    settled(client)
    ranks(gateway, -1, 2)
    client.reader.hosts(MeshHandle(-1), HOSTS).spawn_procs(per_host={"gpus": 2})
    settled(client)
    assert gateway.got(SpawnProcs)[0].hosts.object == -1


def test_a_proc_mesh_whose_hosts_are_unknown_says_so(client: Client) -> None:
    procs = client.reader.procs(MeshHandle(-1), None, Region([], Shape.unity().ndslice), HOSTS)
    with pytest.raises(RuntimeError, match="did not say on which hosts"):
        _ = procs.host_mesh


def test_a_mesh_that_came_back_is_released_when_nobody_holds_it(gateway: FakeGateway, client: Client) -> None:
    mesh: Any = client.reader.actors(MeshHandle(-1), Counter, "counters", PROCS.as_shape(), None)
    part = mesh.slice(hosts=0)
    del mesh
    gc.collect()
    settled(client)
    assert gateway.got(Release) == []
    del part
    gc.collect()
    settled(client)
    assert gateway.got(Release) == [Release(objects=(-1,))]


def test_a_port_that_came_back_can_be_sent_to(gateway: FakeGateway, client: Client) -> None:
    port = client.reader.port("some address", None, False)
    port.send(5)
    settled(client)
    (adopted,) = gateway.got(Adopt)
    assert (adopted.kind, adopted.address) == ("port", "some address")
    assert gateway.got(PortSend)[0].port == adopted.object


def test_actors_of_a_class_that_is_none_are_refused(client: Client) -> None:
    with pytest.raises(UnreadableResult, match="cannot be used here"):
        client.reader.actors(MeshHandle(-1), int, "counters", PROCS.as_shape(), None)


def test_values_and_errors_are_read(client: Client) -> None:
    assert client.reader.value(Fragments((pickle.dumps([1, 2]),)), Adopted(), "counters.count") == [1, 2]
    failure = Failure(kind="actor", message="failed", errors=(ErrorGroup(ranks=(0,), count=1, buffer=0),), total=1)
    error = client.reader.error(failure, [Fragments((pickle.dumps(KeyError("x")),))], "counters.add")
    assert isinstance(error.__cause__, KeyError)
    assert "counters.add failed" in str(error)


def test_objects_of_the_gateway_have_streams_of_their_own() -> None:
    assert len({stream_of(number) for number in (0, 1, 2, -1, -2)}) == 5
