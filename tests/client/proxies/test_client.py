from __future__ import annotations

import pytest

from meshgate.errors import (
    GatewayError,
)
from meshgate.proxies.client import Client, current_client, shutdown_context, use_client
from meshgate.session.dialing import UrlDialer
from meshgate.session.settings import ClientSettings
from tests.client.scripted_gateway import TOKEN, ScriptedGateway


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
