from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from meshgate.errors import (
    GatewayError,
    UnreadableResult,
)
from meshgate.proxies import ActorMeshProxy, HostMeshProxy
from meshgate.proxies import client as client_module
from meshgate.proxies.client import (
    Channel,
    Client,
    ProxyFactory,
    current_client,
    get_or_spawn_controller,
    shutdown_context,
    use_client,
)
from meshgate.proxies.ports import PortReceiver
from meshgate.serialization.unpickling import MeshHandle
from meshgate.session.dialing import UrlDialer
from meshgate.session.settings import ClientSettings
from meshgate.shapes.shape import Extent, Region, Shape
from meshgate_wire.messages import (
    Adopt,
    Call,
    EndSession,
    GetControllers,
    OpenChannel,
    PortSend,
    Release,
    SpawnProcs,
    stream_of,
)
from tests.client.counting import Counter
from tests.client.scripted_gateway import TOKEN, ScriptedGateway
from tests.waiting import wait_for


def test_the_current_client_is_the_last_one_opened_that_is_not_closed(
    gateway: ScriptedGateway, settings: ClientSettings
) -> None:
    dialer = UrlDialer(gateway.url, TOKEN)
    with Client.connect(dialer, settings=settings) as first:
        with Client.connect(dialer, settings=settings) as second:
            assert current_client() is second
            with use_client(first):
                assert current_client() is first
        assert current_client() is first
    with pytest.raises(GatewayError, match="there is no session"):
        current_client()


def test_shutdown_context_ends_every_session(gateway: ScriptedGateway, settings: ClientSettings) -> None:
    clients = [Client.connect(UrlDialer(gateway.url, TOKEN), settings=settings) for _ in range(2)]
    assert shutdown_context(host_timeout=1.0).get(timeout=20) is None
    assert all(client.closed for client in clients)
    assert shutdown_context().get(timeout=20) is None


def test_shutdown_context_ends_the_other_sessions_if_one_is_interrupted(
    gateway: ScriptedGateway, settings: ClientSettings
) -> None:
    clients = [Client.connect(UrlDialer(gateway.url, TOKEN), settings=settings) for _ in range(3)]

    def interrupt() -> None:
        raise KeyboardInterrupt

    clients[1].before_close(interrupt)
    with pytest.raises(KeyboardInterrupt):
        shutdown_context()
    assert [client.closed_cleanly for client in clients] == [True] * 3
    assert len(gateway.got(EndSession)) == 3


def test_a_client_that_is_gone_leaves_nothing_in_the_table(gateway: ScriptedGateway, settings: ClientSettings) -> None:
    before = len(client_module._open_clients)
    Client.connect(UrlDialer(gateway.url, TOKEN), settings=settings).close()
    gc.collect()
    assert len(client_module._open_clients) <= before


HOSTS = Extent(["hosts"], [2]).region
PROCS = Extent(["hosts", "gpus"], [2, 2]).region


def set_ranks(gateway: ScriptedGateway, number: int, count: int) -> None:
    """Sets the size of the gateway's own object ``number``."""
    session = gateway.session()
    gateway.do(lambda: session.ranks.__setitem__(number, list(range(count))))


def synchronize(client: Client) -> None:
    """Waits until the gateway has read everything sent so far."""
    client.attach_hosts("workers", 2).initialized.get(timeout=20)


def test_a_returned_actor_mesh_can_be_called(gateway: ScriptedGateway, client: Client) -> None:
    gateway.functions["add"] = lambda rank, amount: rank + amount
    synchronize(client)
    set_ranks(gateway, -1, 4)
    mesh: Any = ProxyFactory(client).actors(MeshHandle(-1), Counter, "counters", PROCS.as_shape(), None)
    assert isinstance(mesh, ActorMeshProxy)
    assert mesh.add.call(1).get(timeout=20).values() == [1, 2, 3, 4]
    assert mesh.slice(hosts=1).add.call(1).get(timeout=20).values() == [3, 4]
    (adopted,) = gateway.got(Adopt)
    assert (adopted.object, adopted.kind, adopted.name) == (-1, "actors", "counters")
    assert gateway.received.index(adopted) < gateway.received.index(gateway.got(Call)[0])


def test_adopt_messages_name_the_parent(gateway: ScriptedGateway, client: Client) -> None:
    synchronize(client)
    hosts = ProxyFactory(client).hosts(MeshHandle(-1), HOSTS)
    procs = ProxyFactory(client).procs(MeshHandle(-2), hosts, PROCS, PROCS)
    mesh = ProxyFactory(client).actors(MeshHandle(-3), Counter, "counters", PROCS.as_shape(), procs)
    assert isinstance(hosts, HostMeshProxy)
    assert procs.slice(hosts=1, gpus=0).host_mesh == hosts.slice(hosts=1)
    synchronize(client)
    parents = [header.parent and header.parent.object for header in gateway.got(Adopt)]
    assert parents == [None, -1, -2]
    assert client.objects.derives_from(mesh._object, hosts._object)


def test_processes_can_be_spawned_on_returned_hosts(gateway: ScriptedGateway, client: Client) -> None:
    synchronize(client)
    set_ranks(gateway, -1, 2)
    ProxyFactory(client).hosts(MeshHandle(-1), HOSTS).spawn_procs(per_host={"gpus": 2})
    synchronize(client)
    assert gateway.got(SpawnProcs)[0].hosts.object == -1


def test_host_mesh_raises_if_the_hosts_are_unknown(client: Client) -> None:
    procs = ProxyFactory(client).procs(MeshHandle(-1), None, Region([], Shape.unity().ndslice), HOSTS)
    with pytest.raises(RuntimeError, match="are unknown: an endpoint returned it without them"):
        _ = procs.host_mesh


def test_a_returned_mesh_is_released_with_its_last_proxy(gateway: ScriptedGateway, client: Client) -> None:
    mesh: Any = ProxyFactory(client).actors(MeshHandle(-1), Counter, "counters", PROCS.as_shape(), None)
    part = mesh.slice(hosts=0)
    del mesh
    gc.collect()
    synchronize(client)
    assert gateway.got(Release) == []
    del part
    gc.collect()
    synchronize(client)
    wait_for(lambda: gateway.got(Release) == [Release(objects=(-1,))], "the release")


def test_a_returned_port_can_be_sent_to(gateway: ScriptedGateway, client: Client) -> None:
    port = ProxyFactory(client).port("some address", None, False)
    port.send(5)
    synchronize(client)
    (adopted,) = gateway.got(Adopt)
    assert (adopted.kind, adopted.address) == ("port", "some address")
    assert gateway.got(PortSend)[0].port == adopted.object


def test_actors_of_an_invalid_class_are_rejected(client: Client) -> None:
    with pytest.raises(UnreadableResult, match="cannot be used here"):
        ProxyFactory(client).actors(MeshHandle(-1), int, "counters", PROCS.as_shape(), None)


def test_the_gateways_objects_have_streams_of_their_own() -> None:
    assert len({stream_of(number) for number in (0, 1, 2, -1, -2)}) == 5


def test_a_mesh_from_inside_a_pickle_is_adopted_with_its_reference(gateway: ScriptedGateway, client: Client) -> None:
    received: list[bytes] = []
    gateway.on[Adopt] = lambda session, header, buffers: received.extend(buffer.join() for buffer in buffers)
    hosts = ProxyFactory(client).hosts(MeshHandle(reference=b"reference"), HOSTS)
    synchronize(client)
    (header,) = gateway.got(Adopt)
    assert (header.object, header.has_reference, received) == (hosts._object, True, [b"reference"])
    assert header.object > 0


def test_an_unreferenced_channel_is_released(gateway: ScriptedGateway, client: Client) -> None:
    port, receiver = Channel.open(once=True)
    number = port._remote.number
    assert isinstance(receiver, PortReceiver)
    del port, receiver
    gc.collect()
    client.attach_hosts("workers", 2).initialized.get(timeout=20)
    assert gateway.got(OpenChannel)[0].once is True
    wait_for(lambda: gateway.got(Release) == [Release(objects=(number,))], "the release")


def test_a_channel_needs_a_session() -> None:
    with pytest.raises(GatewayError, match="there is no session"):
        Channel.open()


def test_controllers_are_requested_from_an_actor_that_the_gateway_keeps(
    gateway: ScriptedGateway, client: Client
) -> None:
    gateway.functions["get_or_spawn"] = lambda rank, keeper, name, Class, *args: (name, Class.__name__, args)
    hosts = client.attach_hosts("workers", 2)
    with use_client(client):
        assert get_or_spawn_controller("shared", Counter, 3).get(timeout=20) == ("shared", "Counter", (3,))
        assert get_or_spawn_controller("other", Counter).get(timeout=20) == ("other", "Counter", ())
    (requested,) = gateway.got(GetControllers)
    assert requested.hosts == hosts._object
    for call in gateway.got(Call):
        assert call.target.object == requested.object
        assert [(argument.kind, argument.ref.object) for argument in call.arguments] == [("actors", requested.object)]


def test_a_class_other_than_an_actor_is_refused_and_nothing_is_sent(gateway: ScriptedGateway, client: Client) -> None:
    with use_client(client), pytest.raises(ValueError, match="must subclass"):
        get_or_spawn_controller("shared", dict)
    assert gateway.got(GetControllers) == []


def test_a_closed_session_that_had_controllers_is_freed(gateway: ScriptedGateway, settings: ClientSettings) -> None:
    gateway.functions["get_or_spawn"] = lambda rank, keeper, name, Class: name
    client = Client.connect(UrlDialer(gateway.url, TOKEN), settings=settings)
    with use_client(client):
        assert get_or_spawn_controller("shared", Counter).get(timeout=20) == "shared"
    client.close()
    freed = weakref.ref(client)
    del client
    gc.collect()  # the proxy, whose finalizer refers to the session
    gc.collect()
    assert freed() is None
