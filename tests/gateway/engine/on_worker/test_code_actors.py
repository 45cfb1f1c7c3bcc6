"""The engine's own actors on workers. What they do with real hosts is in tests/end_to_end/test_code.py."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import monarch.actor
import pytest

from meshgate_gateway.engine.code.host_agents import AGENT_MODULES, PROCESS_MODULES, worker_sources
from meshgate_gateway.engine.on_worker.code_actors import HostAgentActor, ProcessReloader
from meshgate_gateway.engine.on_worker.process import import_sources
from tests.sync.store.store_host import Host
from tests.sync.trees import Content


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
