from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshgate.client import Client
from meshgate.dialing import UrlDialer
from meshgate.settings import ClientSettings
from tests.client.fake_gateway import TOKEN, FakeGateway


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with FakeGateway() as gateway:
        yield gateway


@pytest.fixture
def settings() -> ClientSettings:
    return ClientSettings(connect_timeout=20, lost_after=0, close_timeout=5, retry_most=0.2)


@pytest.fixture
def client(gateway: FakeGateway, settings: ClientSettings) -> Iterator[Client]:
    with Client.connect(UrlDialer(gateway.url, TOKEN), settings=settings) as client:
        yield client
