from __future__ import annotations

import gc
import weakref

import pytest

from meshgate.proxies.client import Client, use_client
from meshgate.proxies.controllers import get_or_spawn_controller
from meshgate.session.dialing import UrlDialer
from meshgate.session.settings import ClientSettings
from meshgate_wire.messages import Call, GetControllers
from tests.client.counting import Counter
from tests.client.scripted_gateway import TOKEN, ScriptedGateway


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
