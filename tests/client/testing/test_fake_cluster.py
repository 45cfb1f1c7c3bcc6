"""FakeGateway, used with a client of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import meshgate as kt
from meshgate.testing import FakeGateway
from meshgate_wire.messages import Call, SpawnActors
from tests.client.testing.actors import Counter


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with FakeGateway({"workers": 2}) as gateway:
        yield gateway


@pytest.fixture
def client(gateway: FakeGateway) -> Iterator[kt.Client]:
    with kt.Client.connect(kt.UrlDialer(gateway.url, gateway.token)) as client:
        yield client


def test_an_unknown_mesh_fails_with_the_known_ones(client: kt.Client) -> None:
    with pytest.raises(kt.MeshgateError, match="has no mesh 'trainers', only workers"):
        client.attach_hosts("trainers", 2).initialized.get()


def test_requests_are_recorded(gateway: FakeGateway, client: kt.Client) -> None:
    counters: Any = client.attach_hosts("workers", 2).spawn("counters", Counter)
    assert counters.add.call(1).get().values() == [1, 1]
    (spawn,) = (header for header in gateway.received if isinstance(header, SpawnActors))
    (call,) = (header for header in gateway.received if isinstance(header, Call))
    assert (spawn.name, call.endpoint) == ("counters", "add")


def test_reload_is_refused(client: kt.Client) -> None:
    procs = client.attach_hosts("workers", 2).spawn_procs()
    client.code_version = "a version"
    with pytest.raises(kt.InvalidRequestError, match=r"reload\(\): test it with ProcessJob"):
        procs.reload().get()


def test_processes_are_spawned_on_slices_of_hosts(client: kt.Client) -> None:
    hosts = client.attach_hosts("workers", 2).slice(hosts=slice(1, 2))
    counters: Any = hosts.spawn_procs(per_host={"gpus": 2}).spawn("counters", Counter)
    with pytest.raises(kt.ActorError) as caught:
        counters.fail_on.call(1).get()
    assert caught.value.host == "workers-1"
