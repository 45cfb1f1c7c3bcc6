from __future__ import annotations

import gc

import pytest

from meshgate.errors import GatewayError
from meshgate.proxies.channels import Channel
from meshgate.proxies.client import Client
from meshgate.proxies.ports import PortReceiver
from meshgate_wire.messages import OpenChannel, Release
from tests.client.scripted_gateway import ScriptedGateway
from tests.waiting import wait_for


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
