"""Pushes and watches of one client, with a gateway that accepts every version."""

from __future__ import annotations

import json
import queue
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from meshgate.code_sync import push
from meshgate.code_sync.project import Tree, find_tree
from meshgate.code_sync.push import CodeSync, PushedVersions, SessionChecks, SyncReport, raise_if_failed
from meshgate.code_sync.watcher import MAX_BURST
from meshgate.errors import (
    GatewayError,
    MeshFailure,
    SessionExpiredError,
    StaleCodeError,
    StepFailedError,
    SupervisionError,
)
from meshgate.proxies.client import Client
from meshgate_sync.errors import LinkLeavesTree, TreeError
from meshgate_sync.upload import SyncNeed, SyncStatus
from meshgate_wire.messages import SYNC_STREAM, Sync
from tests.client.scripted_gateway import ScriptedGateway, ScriptedSession
from tests.sync.trees import paths

WAIT = 30.0


ONE, TWO = "1" * 64, "2" * 64


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
    while reports.next().routine:
        pass  # a write can be seen as two: the file is emptied first


def test_a_save_during_an_error_is_pushed_once_the_error_is_fixed(
    reports: Reports, code: CodeSync, repository: Path
) -> None:
    link = repository / "experiments/data"
    link.symlink_to("/far/away")
    assert isinstance(reports.next(), LinkLeavesTree)
    (repository / "src/model.py").write_text("STEP = 333\n")
    assert isinstance(reports.next(), LinkLeavesTree)
    link.unlink()
    while isinstance(report := reports.next(), LinkLeavesTree):
        pass  # a write can be seen as two: the file is emptied first
    assert report.files == 1
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


def test_a_push_says_how_far_it_has_come(code: CodeSync, hosts: FakeHosts, repository: Path) -> None:
    how_far = code.follow()
    with code._pushing:
        assert how_far() == f"syncing {repository}: reading its files"
    assert how_far() == f"syncing {repository}: 0 B sent, no host has it yet"
    hosts.silent = True
    version = code.push(wait=False).version
    code._sender.bytes_sent += 5000
    assert re.search(r": 5\.\d kB sent, no host has it yet$", how_far())
    code._versions.update(SyncStatus(root=version, ready=1, hosts=2))
    assert how_far().endswith(" kB sent, 1 of 2 hosts have it")
    assert " 0 B sent, " in code.follow()()


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


@pytest.mark.parametrize("folder", ["data", "node_modules"])
def test_a_save_that_was_dropped_from_a_large_burst_is_pushed(
    code: CodeSync, repository: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """The kernel's queue was full, perhaps of changes to ignored files."""

    def changes(*_: str, watch_filter: Callable[[str, str], bool], **__: object) -> Iterator[set[tuple[str, str]]]:
        yield set()
        (repository / "src/model.py").write_text("STEP = 22\n")
        paths = [str(repository / folder / str(number)) for number in range(MAX_BURST + 1)]
        yield {("added", path) for path in paths if watch_filter("added", path)}

    monkeypatch.setattr("watchfiles.watch", changes)
    code.push()
    reports = Reports()
    code.watch(reports)
    assert reports.next().files == 1
    assert code.push().files == 0


def test_several_directories_are_pushed_and_watched_without_what_is_beside_them(
    client: Client, hosts: FakeHosts, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "unrelated.py").write_text("STEP = 1\n")
    (repository / "src/inner").mkdir()
    (repository / "src/.gitignore").write_text("*.log\n")
    (repository / "src/inner/train.log").write_text("1")
    watched: list[str] = []
    monkeypatch.setattr("watchfiles.watch", lambda *roots, **_: iter(watched.extend(roots) or ()))
    code = CodeSync(client, find_tree([repository / name for name in ("src", "src/inner", "experiments", "src")], []))
    try:
        assert code.push().ready == 2
        code.watch(lambda _: None)
        code._watching.join(WAIT)  # type: ignore[union-attr]
    finally:
        code.close()
    assert paths(code._sender.newest) == [b"experiments", b"src", b"src/.gitignore", b"src/inner", b"src/model.py"]
    assert watched == [str(repository / "src"), str(repository / "experiments")]


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


def test_a_version_whose_offer_was_interrupted_is_offered_again(
    code: CodeSync, hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(code, "_post", interrupt)
        with pytest.raises(KeyboardInterrupt):
            code.push()
    assert code.push().ready == 2
    assert hosts.offers == 1


PIECE = SyncNeed(root=ONE)  # any message


def answer_slowly(code: CodeSync, client: Client, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Answers the gateway with one message after the other, and ends the session before the second."""
    sent: list[int] = []

    def answers(_: object) -> Iterator[Any]:
        for number in range(3):
            if number == 1:
                client._connection.refuse_posts()
                client._closed = True
            sent.append(number)
            yield PIECE, ()

    monkeypatch.setattr(code._sender, "answer_need", answers)
    return sent


def test_an_upload_ends_silently_when_the_session_is_closed(
    code: CodeSync, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sent = answer_slowly(code, client, monkeypatch)
    code._sender_thread.call(lambda: code._answer(PIECE, ()))
    code._sender_thread.close(timeout=WAIT)
    client._closed = False  # so that the fixture closes it
    assert sent == [0, 1]
    assert caplog.records == []


def test_an_upload_whose_post_is_refused_by_the_end_of_the_session_is_silent(
    code: CodeSync, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(_: object) -> None:
        client._closed = True  # while the message waits for space
        raise GatewayError("this program has closed its session")

    monkeypatch.setattr(code, "_post", refused)
    monkeypatch.setattr(code._sender, "answer_need", lambda _: [(PIECE, ())])
    code._sender_thread.call(lambda: code._answer(PIECE, ()))
    code._sender_thread.close(timeout=WAIT)
    client._closed = False
    assert caplog.records == []


def test_hosts_get_what_they_wait_for_although_another_tree_was_chosen(
    code: CodeSync, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted: list[object] = []
    monkeypatch.setattr(code, "_post", posted.append)
    monkeypatch.setattr(code._sender, "answer_need", lambda _: [(PIECE, ()), (PIECE, ())])
    code._stop.set()  # as close() does, which sync_for() calls then
    code._answer(PIECE, ())
    assert len(posted) == 2


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


@pytest.mark.parametrize("value", ["-" * 100_000 + "1", "1" + " + 1" * 100_000], ids=["MemoryError", "RecursionError"])
def test_a_file_that_is_nested_too_deeply_is_named_and_pushed(
    repository: Path, client: Client, hosts: FakeHosts, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    (repository / "src/deep.py").write_text(f"x = {value}\n")
    code = CodeSync(client, Tree(repository))
    try:
        assert code.push().ready == 2
    finally:
        code.close()
    assert f"{repository}/src/deep.py: nested too deeply" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (SyncReport("ab", 3, 12_345, 16, 16, 0.0842), "synced 3 files, 12 kB → 16/16 hosts in 84 ms"),
        (SyncReport("ab", 1, 7, 2, 2, 1.25), "synced 1 file, 7 B → 2/2 hosts in 1.2 s"),
        (SyncReport("ab", 2, 1_500, 2, 2, 1.0), "synced 2 files, 1.5 kB → 2/2 hosts in 1.0 s"),
        (SyncReport("ab", 2, 2_000_000_000_000, 2, 2, 1.0), "synced 2 files, 2000 GB → 2/2 hosts in 1.0 s"),
    ],
)
def test_a_report_is_one_line(report: SyncReport, line: str) -> None:
    assert str(report) == line


class FakeSession:
    def __init__(self) -> None:
        self.error: Exception | None = None
        self.attach_failure = ""
        self.looks, self.moves = 0, 0

    def checks(self) -> SessionChecks:
        names = ("workers", {1: "b"})
        return SessionChecks(lambda: self.error, lambda: self.attach_failure, lambda _: names, self.progress)

    def progress(self) -> int:
        self.looks += 1
        return min(self.looks, self.moves)


def status(version: str, ready: int = 0, **failed: str) -> SyncStatus:
    return SyncStatus(root=version, ready=ready, hosts=2, failed=failed)


@pytest.fixture
def session() -> FakeSession:
    return FakeSession()


@pytest.fixture
def versions(session: FakeSession) -> PushedVersions:
    versions = PushedVersions(session.checks())
    versions.add(ONE, reset=True)
    return versions


def test_a_wait_ends_when_every_host_is_ready(versions: PushedVersions) -> None:
    seen: list[SyncStatus] = []
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(versions.wait, ONE, seen.append)
        versions.update(status(ONE, 1))
        versions.update(done := status(ONE, 2))
        assert waiting.result(30) is done


def test_a_newer_version_that_is_ready_ends_the_wait_for_an_older_one(versions: PushedVersions) -> None:
    versions.add(TWO, reset=True)
    versions.update(status(TWO, 2))
    assert versions.wait(ONE).root == TWO


def test_an_older_version_does_not_end_the_wait_for_a_newer_one(versions: PushedVersions) -> None:
    versions.update(status(ONE, 2))
    versions.add(TWO, reset=True)
    versions.update(failed := status(TWO, 1, host="full"))
    assert versions.wait(TWO) is failed


def test_a_failure_of_an_older_version_does_not_end_the_wait(versions: PushedVersions) -> None:
    versions.update(status(ONE, 1, host="full"))
    versions.add(TWO, reset=True)
    versions.update(status(TWO, 2))
    assert versions.wait(ONE).root == TWO


def test_a_version_that_is_offered_again_loses_its_old_status(versions: PushedVersions) -> None:
    versions.update(status(ONE, 1, host="full"))
    versions.add(ONE, reset=False)
    assert versions.failed() == [ONE]
    versions.add(ONE, reset=True)
    assert versions.failed() == []


def test_a_status_of_an_unknown_version_is_ignored(versions: PushedVersions) -> None:
    versions.update(status(TWO, 1, host="full"))
    assert versions.failed() == []


def test_a_wait_raises_the_error_of_an_ended_session(versions: PushedVersions, session: FakeSession) -> None:
    session.error = SessionExpiredError("the session expired")
    lengths = set()
    for _ in range(3):
        with pytest.raises(SessionExpiredError) as caught:
            versions.wait(ONE)
        lengths.add(len(caught.traceback))
    assert len(lengths) == 1


def test_the_end_of_the_session_explains_the_failure_of_a_host(versions: PushedVersions, session: FakeSession) -> None:
    versions.update(status(ONE, 1, host="its agent exited"))
    session.error = SessionExpiredError("the gateway was killed")
    with pytest.raises(SessionExpiredError):
        versions.wait(ONE)


def test_a_wait_without_attached_hosts_reports_why(versions: PushedVersions, session: FakeSession) -> None:
    session.attach_failure = "workers-1 was killed"
    with pytest.raises(StepFailedError, match="no host received code version 111111111111") as raised:
        versions.wait(ONE)
    assert "workers-1 was killed" in str(raised.value)
    assert raised.value.step == "attaching the hosts"


def test_closing_ends_a_wait(versions: PushedVersions) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(versions.wait, ONE)
        versions.close()
        with pytest.raises(StaleCodeError, match="closed before every host had code version 111111111111"):
            waiting.result(30)


def test_a_timeout_reports_how_many_hosts_are_ready(versions: PushedVersions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "SYNC_TIMEOUT", 0.0)
    with pytest.raises(StaleCodeError, match="every host: no host has reported, and nothing moved for 0 s"):
        versions.wait(ONE)
    versions.update(status(ONE, 1))
    with pytest.raises(StaleCodeError, match="1 of 2 hosts have it"):
        versions.wait(ONE)


def test_a_wait_ends_only_after_a_time_in_which_nothing_moved(
    versions: PushedVersions, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push, "SYNC_TIMEOUT", 0.01)
    session.moves = 5
    with pytest.raises(StaleCodeError, match="nothing moved"):
        versions.wait(ONE)
    assert session.looks > 5


def test_an_error_names_the_failed_hosts_and_counts_the_rest(session: FakeSession) -> None:
    checks = session.checks()
    raise_if_failed(status(ONE, 2), checks)
    with pytest.raises(StaleCodeError, match=r"code version 111111111111 did not reach 1 host: a: full$") as raised:
        raise_if_failed(status(ONE, 1, a="full"), checks)
    assert raised.value.hosts == ("a",)
    many = SyncStatus(root=ONE, ready=0, hosts=10, failed={f"host-{number}": "full" for number in range(10)})
    with pytest.raises(StaleCodeError, match=r"did not reach 10 hosts: host-0: full; .*host-7: full \(and 2 more\)$"):
        raise_if_failed(many, checks)


def test_hosts_that_were_lost_are_a_supervision_error_with_host_and_reason(session: FakeSession) -> None:
    lost = SyncStatus(root=ONE, ready=1, hosts=2, failed={"b": "killed by SIGKILL"}, lost=("b",))
    with pytest.raises(
        SupervisionError, match=r"^1 host was lost, .* did not reach it: b: killed by SIGKILL$"
    ) as raised:
        raise_if_failed(lost, session.checks())
    assert raised.value.failure == MeshFailure("workers", "b: killed by SIGKILL", (1,), {1: "b"})


def test_a_lost_host_beside_one_that_cannot_store_the_version_is_named_too(session: FakeSession) -> None:
    both = SyncStatus(root=ONE, ready=0, hosts=2, failed={"a": "full", "b": "killed"}, lost=("b",))
    with pytest.raises(StaleCodeError, match="did not reach 2 hosts: a: full; b: killed"):
        raise_if_failed(both, session.checks())


def test_hosts_that_the_status_has_no_room_for_are_counted(session: FakeSession) -> None:
    some = SyncStatus(root=ONE, ready=0, hosts=5000, failed={"a": "full"}, failures=5000)
    with pytest.raises(StaleCodeError, match=r"did not reach 5000 hosts: a: full \(and 4999 more\)$"):
        raise_if_failed(some, session.checks())
