from __future__ import annotations

import json
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from meshgate.cli import ui
from meshgate.cli.app import app
from meshgate.errors import GatewayError, JobNotRunning
from meshgate.ranks.stacks import ProcessStacks, Stacks
from meshgate.ranks.usage import Gpu, ProcessUsage, Usage, UsageMeter
from meshgate.ui.server import StackRequest
from meshgate_wire.status import JobStatus
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


@pytest.mark.parametrize("ends", [True, False])
def test_the_page_offers_to_end_a_job_that_kill_ends(
    run: CliRunner, opened: list[str], monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    offered: list[bool] = []

    async def run_page(feed: Any, port: int, started: Any) -> None:
        offered.append(json.loads(feed.message(0)[0])["may_end"])

    monkeypatch.setattr(ui, "run_page", run_page)
    monkeypatch.setattr(FakeSource, "_ends_when_killed", ends)
    assert run.invoke(app, ["ui"]).exit_code == 0
    assert offered == [ends]


class Looked:
    """A job of two sessions with meshes of the same name. ``asked``: the ranks of the hosts that were asked."""

    def __init__(self) -> None:
        self._running, self._client = None, None
        self.asked: list[slice] = []
        self.found = [ProcessStacks("workers-1", "procs", 3, 7, session=each, problem=f"it is {each}") for each in "ab"]
        self.found.append(ProcessStacks("workers-1", "procs", 4, 8, session="b", problem="it is another rank"))

    def _state(self) -> Any:
        self._client = SimpleNamespace(close=self._close)  # type: ignore[assignment]
        return SimpleNamespace(_hosts={"workers": SimpleNamespace(slice=lambda hosts: hosts)})

    def _close(self) -> None:
        self._client = None

    def status(self) -> JobStatus:
        return FakeSource().reported

    def read_stacks(self, meshes: dict[str, slice]) -> Stacks:
        assert self._client is not None
        self.asked.append(meshes["workers"])
        if len(self.asked) > 2:
            raise GatewayError("the gateway has ended")
        return Stacks(tuple(self.found), {} if self.found else {"workers": "its hosts are gone"})


def question(session: str = "b", host: str = "workers-1") -> StackRequest:
    return StackRequest(session=session, host=host, mesh="procs", rank=3)


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Looked:
    looked = Looked()
    monkeypatch.setattr(ui, "read_stacks", looked.read_stacks)
    return looked


def test_a_stack_is_read_from_its_host_in_a_session_that_ends_with_the_answer(looked: Looked) -> None:
    read = ui._stack_reader(looked)  # type: ignore[arg-type]
    assert read(question()) == "  it is b"
    looked.found = []
    assert read(question()) == "its hosts are gone"
    with pytest.raises(GatewayError, match="has ended"):
        read(question())
    assert looked.asked == [slice(1, 2)] * 3
    assert looked._client is None


def test_a_process_that_has_ended_and_a_host_that_is_gone_have_no_stack(looked: Looked) -> None:
    read = ui._stack_reader(looked)  # type: ignore[arg-type]
    assert read(question("c")) == "no process of this rank runs"
    assert read(question(host="workers-9")) == "the job has no host 'workers-9' any more"
    assert looked._client is None


def test_ranks_are_measured_in_a_session_that_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, own = (SimpleNamespace(apply_id=apply_id, _running=None, _client=None) for apply_id in "aa")
    closed: list[str] = []

    def start() -> Any:
        own._client = SimpleNamespace(close=lambda: closed.append("session"))
        return SimpleNamespace(_hosts={})

    own._state = start
    process = ProcessUsage("procs", 1, "workers-0", 7, 50.0, 2**20, (0,), None)
    usage = Usage([process], [Gpu("workers-0", 0, 90, 2**30, None)], {"workers-1": "it is lost"})
    monkeypatch.setattr(ui, "find_job", lambda job, namespace: own)
    monkeypatch.setattr(UsageMeter, "read", lambda meter: usage)
    with ui._open_meter(shown, None, None) as look:  # type: ignore[arg-type]
        assert look() == {"ranks": [("procs", 1, 50.0, 2**20, 90, 2**30)], "problems": {"workers-1": "it is lost"}}
        assert closed == []
    assert closed == ["session"]


def test_another_job_than_the_page_shows_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "find_job", lambda job, namespace: SimpleNamespace(apply_id="another"))
    with pytest.raises(JobNotRunning, match="run it again with the job's id"), ui._open_meter(FakeSource(), None, None):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize("arguments", [["ui", "--port", "99999"], ["ui", "--port", "-1"], ["forward", "99999"]])
def test_an_invalid_port_is_refused(run: CliRunner, arguments: list[str]) -> None:
    result = run.invoke(app, arguments)
    assert (result.exit_code, "Invalid value for" in result.output) == (2, True)


def test_a_port_in_use_is_an_error(run: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "find_job", lambda job, namespace: FakeSource())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run.invoke(app, ["ui", "--no-browser", "--port", str(port)])
    assert result.exit_code == 1
    assert f"cannot serve the page on port {port}: " in result.output
    assert "choose another with --port" in result.output
