"""The engine's own actors on workers. What they do with real hosts is in tests/end_to_end/test_code.py."""

from __future__ import annotations

import asyncio
import importlib
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import monarch.actor
import pytest

from meshgate_gateway.engine.code.host_agents import AGENT_MODULES, PROCESS_MODULES, worker_sources
from meshgate_gateway.engine.on_worker import code_actors
from meshgate_gateway.engine.on_worker.code_actors import HostAgentActor, KeptValuesActor, ProcessReloader
from meshgate_gateway.engine.on_worker.kept_values import KeptStore
from meshgate_gateway.engine.on_worker.process import import_sources
from meshgate_processes.identity import identify_process
from meshgate_processes.marks import is_sync_agent
from tests.sync.store.store_host import Host
from tests.sync.trees import Content

COMM = Path("/proc/self/comm")  # the name of this process


@pytest.fixture(autouse=True)
def _keep_the_name_of_this_process() -> Iterator[None]:
    name = COMM.read_text() if COMM.exists() else None
    yield
    if name is not None:
        COMM.write_text(name)


@pytest.mark.skipif(not COMM.exists(), reason="the system has no /proc")
def test_the_process_of_an_agent_has_the_name_by_which_its_host_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHGATE_HOME", str(tmp_path))
    monkeypatch.setattr(monarch.actor, "current_rank", lambda: SimpleNamespace(rank=0))
    this = identify_process(os.getpid())
    assert this is not None
    assert not is_sync_agent(this)
    agent = HostAgentActor(worker_sources(AGENT_MODULES))
    HostAgentActor.start._method(agent, ["workers-0"], b"secret", "owner", "127.0.0.1", [""])
    assert is_sync_agent(this)
    agent.__cleanup__(None)


def test_an_agent_whose_store_cannot_be_opened_returns_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MESHGATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(monarch.actor, "current_rank", lambda: SimpleNamespace(rank=0))
    agent = HostAgentActor(worker_sources(AGENT_MODULES))
    refused = HostAgentActor.start._method(agent, ["workers-0"], b"secret", "owner", "127.0.0.1", [""])
    assert refused.startswith(f"the store {tmp_path}/file cannot be written: ")


def test_a_process_without_a_version_reloads_its_modules_after_a_reload_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "reloaded_after_a_failure"
    sources = worker_sources(PROCESS_MODULES)
    monkeypatch.setenv("MESHGATE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(importlib.import_module(f"{import_sources(sources)}.store.home"), "_active", [])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / f"{name}.py").write_text("X = 1")
    module: Any = ModuleType(name)
    module.X, module.__file__ = 1, str(tmp_path / f"{name}.py")
    monkeypatch.setitem(sys.modules, name, module)
    content = Content()
    host = Host(tmp_path / "home", content)
    failing, mended = (content.tree({f"{name}.py".encode(): text}) for text in (b"X = 2 / 0", b"X = 2"))
    reloader, earlier = ProcessReloader(sources), list(sys.path)
    host.sync(failing)
    with pytest.raises(ZeroDivisionError):
        ProcessReloader.reload._method(reloader, failing.digest.hex(), [""])
    assert (module.X, sys.path) == (1, earlier)
    path = host.sync(mended)
    assert ProcessReloader.reload._method(reloader, mended.digest.hex(), [""])["modules"] == (name,)
    assert (module.X, module.__file__) == (2, f"{path}/{name}.py")
    assert not host.store.snapshots.in_use(failing.digest)


class Servers:
    """A mesh of the actors that serve kept values: each has the coordinates in place of a value."""

    unpickled = 0

    def __init__(self, coordinates: dict[str, int]) -> None:
        self.coordinates, self.read_at = coordinates, self

    def slice(self, **coordinates: int) -> Servers:
        return Servers(coordinates)

    async def call_one(self, number: int, position: int) -> tuple[int, int, dict[str, int]]:
        return number, position, self.coordinates

    def __reduce__(self) -> Any:
        return unpickle_servers, (self.coordinates,)


def unpickle_servers(coordinates: dict[str, int]) -> Servers:
    Servers.unpickled += 1
    return Servers(coordinates)


def test_values_come_from_the_process_of_their_rank_whose_actor_is_unpickled_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = KeptStore(None)
    monkeypatch.setattr(code_actors, "process_store", lambda *_: store)
    actor, mesh, alone = KeptValuesActor(1), pickle.dumps(Servers({})), pickle.dumps(Servers({"alone": 0}))

    def get(position: int, data: bytes, sizes: dict[str, int], positions: tuple[int, ...] = ()) -> Any:
        return asyncio.run(actor._get(position, 5, "call", data, tuple(sizes), tuple(sizes.values()), positions, False))

    sizes = {"hosts": 2, "gpus": 3}
    for _ in range(2):
        assert get(4, mesh, sizes) == (5, 4, {"hosts": 1, "gpus": 1})
        assert get(2, mesh, sizes, (8, 7, 6, 5, 4, 3)) == (5, 6, {"hosts": 0, "gpus": 2})
        assert get(3, alone, {}) == (5, 0, {"alone": 0})
    assert Servers.unpickled == 2
    store.add(5, 4, "call", "own")
    assert get(4, mesh, sizes) == "own"
