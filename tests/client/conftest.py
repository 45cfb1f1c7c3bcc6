"""A scripted gateway and a client connected to it. Every test checks the invariants of its connections and futures."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from meshgate.proxies.client import Client
from meshgate.session.dialing import UrlDialer
from meshgate.session.futures import FutureProxy
from meshgate.session.settings import ClientSettings
from meshgate.session.transport.connection_thread import ConnectionThread
from tests.client.jobs.fake_job import RUNNING
from tests.client.scripted_gateway import TOKEN, ScriptedGateway


@pytest.fixture(autouse=True)
def _connections_and_futures_are_valid(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    connections: weakref.WeakSet[ConnectionThread] = weakref.WeakSet()
    futures: weakref.WeakSet[FutureProxy[Any]] = weakref.WeakSet()
    create_connection, create_future = ConnectionThread.__init__, FutureProxy.__init__

    def record_connection(self: ConnectionThread, *args: Any, **kwargs: Any) -> None:
        create_connection(self, *args, **kwargs)
        connections.add(self)

    def record_future(self: FutureProxy[Any], *args: Any, **kwargs: Any) -> None:
        create_future(self, *args, **kwargs)
        futures.add(self)

    monkeypatch.setattr(ConnectionThread, "__init__", record_connection)
    monkeypatch.setattr(FutureProxy, "__init__", record_future)
    yield
    for connection in list(connections):
        connection.validate_state()
    for future in list(futures):
        future.validate_state()


@pytest.fixture(autouse=True)
def _no_fake_jobs() -> None:
    """Others of this process may have left some that they did not end."""
    RUNNING.clear()


@pytest.fixture
def no_jobs_of_other_tests(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Other tests of this process may share a job that runs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))


@pytest.fixture
def gateway() -> Iterator[ScriptedGateway]:
    with ScriptedGateway() as gateway:
        yield gateway


@pytest.fixture
def settings() -> ClientSettings:
    return ClientSettings(connect_timeout=20, lost_after=0, close_timeout=5, retry_most=0.2)


@pytest.fixture
def client(gateway: ScriptedGateway, settings: ClientSettings) -> Iterator[Client]:
    with Client.connect(UrlDialer(gateway.url, TOKEN), settings=settings) as client:
        yield client
        client.validate_state()
