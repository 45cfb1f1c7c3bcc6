"""The admin server's address, with answers in place of hosts. A real one is in tests/end_to_end/test_ranks.py."""

from __future__ import annotations

from typing import Any

import pytest

from meshgate.errors import JobError
from meshgate.ranks import admin
from meshgate.ranks.admin import MeshAdmin, MeshAdminConfig
from meshgate.session.futures import FutureProxy


class Hosts:
    def __init__(self, url: str = "http://localhost:5678", problem: str = "") -> None:
        self.answer = (url, problem)
        self.asked: list[Any] = []
        self._client = object()
        self.start = self

    def slice(self, hosts: slice) -> Hosts:
        assert hosts == slice(0, 1)
        return self

    def spawn_procs(self, name: str) -> Hosts:
        return self

    def spawn(self, name: str, Class: type) -> Hosts:
        return self

    def call_one(self, meshes: list[Any], address: str) -> FutureProxy[Any]:
        self.asked.append((len(meshes), address))
        return FutureProxy.resolved(self.answer)


class Forwarded:
    port, closed, error = 4711, False, None

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def forwarded(monkeypatch: pytest.MonkeyPatch) -> Forwarded:
    found = Forwarded()

    def forward(hosts: Any, port: int, rank: int, **options: Any) -> Forwarded:
        assert (port, rank) == (5678, 0)
        return found

    monkeypatch.setattr(admin, "forward", forward)
    return found


def test_a_session_has_one_server_for_all_meshes(forwarded: Forwarded) -> None:
    hosts: Any = Hosts()
    server = MeshAdmin(MeshAdminConfig())
    assert server.url({"a": hosts, "b": hosts}) == "http://127.0.0.1:4711"
    assert server.url({"a": hosts, "b": hosts}) == "http://127.0.0.1:4711"
    assert hosts.asked == [(2, "127.0.0.1:0")]
    hosts._client = object()
    server.url({"a": hosts})
    assert len(hosts.asked) == 2
    assert forwarded.closed
    server.close()
    server.close()


def test_a_server_that_was_lost_is_started_again(forwarded: Forwarded) -> None:
    hosts: Any = Hosts()
    server = MeshAdmin(MeshAdminConfig("localhost:5678"))
    server.url({"a": hosts})
    forwarded.error = JobError("the host was lost")  # type: ignore[assignment]
    server.url({"a": hosts})
    assert hosts.asked == [(1, "localhost:5678")] * 2


@pytest.mark.usefixtures("forwarded")
def test_a_server_that_does_not_start_says_why() -> None:
    hosts: Any = Hosts("", "address in use")
    with pytest.raises(JobError, match=r"does not start on 127.0.0.1:80 of the first host: address in use"):
        MeshAdmin(MeshAdminConfig("127.0.0.1:80")).url({"a": hosts})


@pytest.mark.parametrize("address", ["0.0.0.0:1729", "[::]:1729", "1729", "127.0.0.1:http"])
def test_addresses_that_others_can_reach_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"expected 127.0.0.1:PORT. The admin server has no password"):
        MeshAdminConfig(address)
