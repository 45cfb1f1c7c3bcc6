from __future__ import annotations

import socket
from typing import Any

import pytest
from typer.testing import CliRunner

from meshgate.cli import ui
from meshgate.cli.app import app
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


def test_a_port_in_use_is_an_error(run: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "find_job", lambda job, namespace: FakeSource())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run.invoke(app, ["ui", "--no-browser", "--port", str(port)])
    assert result.exit_code == 1
    assert f"cannot serve the page on port {port}: " in result.output
    assert "choose another with --port" in result.output
