"""Pushes and watches of one client, with a gateway that accepts every version."""

from __future__ import annotations

import json
import queue
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from meshgate.code_sync.project import Tree
from meshgate.code_sync.push import CodeSync
from meshgate.code_sync.report import SyncReport
from meshgate.errors import StaleCodeError
from meshgate.proxies.client import Client
from meshgate_sync.errors import LinkLeavesTree, TreeError
from meshgate_sync.upload.protocol import SyncStatus
from meshgate_wire.messages import SYNC_STREAM, Sync
from tests.client.scripted_gateway import ScriptedGateway, ScriptedSession

WAIT = 30.0


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for folder in ("src", "experiments"):
        (tmp_path / "repository" / folder).mkdir(parents=True)
    (tmp_path / "repository/src/model.py").write_text("STEP = 1\n")
    return tmp_path / "repository"


class FakeHosts:
    """Reports for every offered version that two hosts have it, or why ``failed`` do not."""

    def __init__(self, gateway: ScriptedGateway) -> None:
        self.failed: dict[str, str] = {}
        self.offers = 0
        self.silent = False
        self.offered = threading.Event()
        gateway.on[Sync] = self._receive

    def _receive(self, session: ScriptedSession, header: Sync, _: Any) -> None:
        body = json.loads(header.body)
        if body["type"] == "sync_offer":
            self.offers += 1
            self.root = body["root"]
            self.offered.set()
            if not self.silent:
                self.report(session)

    def report(self, session: ScriptedSession) -> None:
        """Sends the status of the newest version."""
        status = SyncStatus(root=self.root, ready=2 - len(self.failed), hosts=2, failed=self.failed)
        session.send(Sync(body=status.model_dump_json()), stream=SYNC_STREAM)


@pytest.fixture
def hosts(gateway: ScriptedGateway) -> FakeHosts:
    return FakeHosts(gateway)


@pytest.fixture
def code(client: Client, hosts: FakeHosts, repository: Path) -> Iterator[CodeSync]:
    code = CodeSync(client, Tree(repository))
    yield code
    code.close()


class Reports:
    """The reports of a watch, in order."""

    def __init__(self) -> None:
        self._reports: queue.Queue[SyncReport | Exception] = queue.Queue()

    def __call__(self, outcome: SyncReport | Exception) -> None:
        self._reports.put(outcome)

    def next(self) -> Any:
        return self._reports.get(timeout=WAIT)


@pytest.fixture
def reports(code: CodeSync, repository: Path) -> Reports:
    """The reports of a watch that has begun; the save before it has been reported."""
    reports = Reports()
    code.push()
    (repository / "before").write_text("saved before the watch")
    code.watch(reports)
    assert reports.next().files == 1
    return reports


def test_a_save_is_pushed_whatever_the_working_directory(
    reports: Reports, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository / "experiments")
    (repository / "src/model.py").write_text("STEP = 22\n")
    assert reports.next().files == 1


def test_a_busy_file_is_named_once_and_then_routine(reports: Reports, repository: Path) -> None:
    seen = []
    while not any(report.busy for report in seen):
        (repository / "train.log").write_text(f"{len(seen)} lines\n")
        seen.append(reports.next())
    assert seen[-1].busy == ("train.log",)
    (repository / "train.log").write_text("and more\n")
    assert reports.next().routine
    (repository / "src/model.py").write_text("STEP = 22\n")
    assert not reports.next().routine


def test_a_save_during_an_error_is_pushed_once_the_error_is_fixed(
    reports: Reports, code: CodeSync, repository: Path
) -> None:
    link = repository / "experiments/data"
    link.symlink_to("/far/away")
    assert isinstance(reports.next(), LinkLeavesTree)
    (repository / "src/model.py").write_text("STEP = 333\n")
    assert isinstance(reports.next(), LinkLeavesTree)
    link.unlink()
    assert reports.next().files == 1
    assert code.push().files == 0


def test_every_waiting_push_raises_a_failure_and_the_next_push_offers_the_version_again(
    code: CodeSync, hosts: FakeHosts, gateway: ScriptedGateway
) -> None:
    hosts.silent, hosts.failed = True, {"workers-1": "its disk is full"}
    wait, waiting = code._versions.wait, threading.Barrier(3)

    def wait_after_barrier(*arguments: Any) -> Any:
        waiting.wait(WAIT)
        return wait(*arguments)

    code._versions.wait = wait_after_barrier  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as others:
        pushes = [others.submit(code.push) for _ in range(2)]
        waiting.wait(WAIT)
        assert hosts.offered.wait(WAIT)
        gateway.do(lambda: hosts.report(gateway.session()))
        for push in pushes:
            with pytest.raises(StaleCodeError, match="workers-1: its disk is full"):
                push.result(WAIT)
    code._versions.wait = wait  # type: ignore[method-assign]
    hosts.silent, hosts.failed = False, {}
    assert code.push().ready == 2
    assert hosts.offers == 2


def test_a_watch_obeys_meshgateignore_and_ignored_files(
    reports: Reports, code: CodeSync, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / ".meshgateignore").write_text("!.idea/\n")
    assert reports.next().files == 1
    scans = []
    push = code._push
    monkeypatch.setattr(code, "_push", lambda changed: scans.append(changed) or push(changed))
    for folder in (".git", ".idea"):
        (repository / folder).mkdir()
        (repository / folder / "index").write_text("x")
    assert reports.next().files >= 1
    assert not [path for changed in scans for path in changed or [] if ".git" in Path(path).parts]


def test_a_watch_that_fails_is_reported_and_can_be_resumed(
    code: CodeSync, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("OS file watch limit reached.")

    reports = Reports()
    with monkeypatch.context() as patched:
        patched.setattr("watchfiles.watch", fail)
        code.watch(reports)
        error = reports.next()
    assert isinstance(error, TreeError)
    assert "OS file watch limit reached" in str(error)
    code.watch(reports)
    assert reports.next().files
    shutil.rmtree(repository)
    while not isinstance(error := reports.next(), Exception) or "was removed" not in str(error):
        pass
    repository.mkdir()
    (repository / "new").write_text("1")
    code.watch(reports)
    assert reports.next().files


def test_a_version_that_failed_without_a_waiting_push_is_offered_again(code: CodeSync, hosts: FakeHosts) -> None:
    hosts.failed = {"workers-1": "its pod is being deleted"}
    code.push(wait=False)
    versions = code._versions
    with versions._changed:
        assert versions._changed.wait_for(lambda: any(each.failed for each in versions._statuses.values()), WAIT)
    hosts.failed = {}
    assert code.push().ready == 2
    assert hosts.offers == 2


@pytest.mark.usefixtures("hosts")
def test_a_sync_succeeds_if_the_cache_of_the_scan_cannot_be_saved(
    client: Client, repository: Path, tmp_path: Path
) -> None:
    (tmp_path / "occupied").write_text("")
    code = CodeSync(client, Tree(repository), cache_file=tmp_path / "occupied" / "scan")
    with pytest.warns(UserWarning, match=r"cannot save .*/occupied/scan: .*set XDG_CACHE_HOME") as caught:
        assert code.push().ready == 2
    assert caught[0].filename == __file__
    (repository / "src/model.py").write_text("STEP = 2\n")
    assert code.push().ready == 2  # warns once
    code.close()


def test_a_file_that_is_nested_too_deeply_is_named_and_pushed(
    repository: Path, client: Client, hosts: FakeHosts, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "src/deep.py").write_text("x = " + "-" * 100_000 + "1\n")
    code = CodeSync(client, Tree(repository))
    try:
        assert code.push().ready == 2
    finally:
        code.close()
    assert f"{repository}/src/deep.py: nested too deeply" in capsys.readouterr().err
