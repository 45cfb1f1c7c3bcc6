from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from meshgate.cli import ui
from meshgate.cli.app import app
from meshgate.errors import GatewayError
from meshgate.ranks.stacks import ProcessStacks, Stacks
from tests.client.ui.sources import FakeSource


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The links that a browser was opened with. The page ends at once."""
    links: list[str] = []

    async def run_page(feed: Any, port: int, started: Any) -> None:
        feed.poll()
        started("http://127.0.0.1:1/?token=x")

    monkeypatch.setattr(ui, "find_job", lambda job, namespace: FakeSource())
    monkeypatch.setattr(ui, "run_page", run_page)
    monkeypatch.setattr(ui.webbrowser, "open", links.append)
    return links


def test_the_link_is_printed_and_opened(run: CliRunner, opened: list[str]) -> None:
    assert "http://127.0.0.1:1/?token=x\nThe link works once" in run.invoke(app, ["ui"]).output
    assert opened == ["http://127.0.0.1:1/?token=x"]
    assert run.invoke(app, ["ui", "--no-browser"]).exit_code == 0
    assert len(opened) == 1


class Looked:
    """A job of two sessions with meshes of the same name. ``open``: the sessions that this command has."""

    def __init__(self) -> None:
        self.open, self.asked = 0, 0
        self.client = SimpleNamespace(close=self._close)
        self.found = [ProcessStacks("workers-0", "procs", 1, 7, session=each, problem=f"it is {each}") for each in "ab"]

    def _state(self) -> None:
        self.open += 1

    def _close(self) -> None:
        self.open -= 1

    def stacks(self, rank: int) -> Stacks:
        assert (self.open, rank) == (1, 1)
        self.asked += 1
        if self.asked > 2:
            raise GatewayError("the gateway has ended")
        return Stacks(tuple(self.found), {} if self.found else {"workers": "its hosts are gone"})


def test_a_stack_is_read_in_a_session_that_ends_with_the_answer() -> None:
    job = Looked()
    read = ui._stack_reader(job)  # type: ignore[arg-type]
    assert read("b", "procs", 1) == "  it is b"
    job.found = []
    assert read("b", "procs", 1) == "its hosts are gone"
    with pytest.raises(GatewayError, match="has ended"):
        read("b", "procs", 1)
    assert job.open == 0


def test_a_process_that_has_ended_runs_nothing() -> None:
    job = Looked()
    assert ui._stack_reader(job)("c", "procs", 1) == "no process of this rank runs"  # type: ignore[arg-type]


def test_a_port_in_use_is_an_error(run: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "find_job", lambda job, namespace: FakeSource())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run.invoke(app, ["ui", "--no-browser", "--port", str(port)])
    assert result.exit_code == 1
    assert f"cannot serve the page on port {port}: " in result.output
    assert "choose another with --port" in result.output
