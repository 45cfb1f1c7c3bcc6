"""The engine's own actors on workers. What they do with real hosts is in tests/end_to_end/test_code.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import monarch.actor
import pytest

from meshgate_gateway.engine.code.host_agents import AGENT_MODULES, worker_sources
from meshgate_gateway.engine.on_worker.code_actors import HostAgentActor


def test_an_agent_whose_store_cannot_be_opened_returns_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MESHGATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(monarch.actor, "current_rank", lambda: SimpleNamespace(rank=0))
    agent = HostAgentActor(worker_sources(AGENT_MODULES))
    refused = HostAgentActor.start._method(agent, ["workers-0"], b"secret", "owner", "127.0.0.1", [""])
    assert refused.startswith(f"the store {tmp_path}/file cannot be written: ")
