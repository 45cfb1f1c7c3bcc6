"""The actor that starts the admin server, used here without a host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from meshgate.ranks.admin_on_host import AdminStarter
from meshgate.session.futures import FutureProxy

host_mesh: Any = pytest.importorskip("monarch._src.actor.host_mesh")


@pytest.fixture
def stdout() -> Iterator[None]:
    """The actor silences its process, which is the test's."""
    kept = os.dup(1)
    yield
    os.dup2(kept, 1)
    os.close(kept)


@pytest.mark.usefixtures("stdout")
def test_it_returns_the_url_or_what_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def spawn_admin(meshes: Any, admin_addr: str) -> FutureProxy[Any]:
        if admin_addr.endswith(":80"):
            return FutureProxy.failed(RuntimeError("permission denied"))
        return FutureProxy.resolved((f"http://{admin_addr}", "reference"))

    monkeypatch.setattr(host_mesh, "_spawn_admin", spawn_admin)
    start = AdminStarter.start._method
    assert start(AdminStarter(), [], "localhost:5678") == ("http://localhost:5678", "")
    assert start(AdminStarter(), [], "localhost:80") == ("", "permission denied")
