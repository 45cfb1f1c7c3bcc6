"""What a client's sync sends when, told by a gateway that takes everything at once."""

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

from meshgate.client import Client
from meshgate.code import CodeSync, SyncReport
from meshgate.errors import StaleCodeError
from meshgate.project import Tree
from meshgate_sync.errors import LinkLeavesTree, TreeError
from meshgate_sync.protocol import SyncStatus
from meshgate_wire.messages import SYNC_STREAM, Sync
from tests.client.fake_gateway import FakeGateway, FakeSession

WAIT = 30.0


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for folder in ("src", "experiments"):
        (tmp_path / "repository" / folder).mkdir(parents=True)
    (tmp_path / "repository/src/model.py").write_text("STEP = 1\n")
    return tmp_path / "repository"


class Answering:
    """Says of every version that its hosts have it, or why ``failed`` have not."""

    def __init__(self, gateway: FakeGateway) -> None:
        self.failed: dict[str, str] = {}
        self.offers = 0
        self.silent = False
        self.offered = threading.Event()
        gateway.on[Sync] = self._answer

    def _answer(self, session: FakeSession, header: Sync, _: Any) -> None:
        body = json.loads(header.body)
        if body["type"] == "sync_offer":
            self.offers += 1
            self.root = body["root"]
            self.offered.set()
            if not self.silent:
                self.tell(session)

    def tell(self, session: FakeSession) -> None:
        """How the newest version stands."""
        status = SyncStatus(root=self.root, ready=2 - len(self.failed), hosts=2, failed=self.failed)
        session.send(Sync(body=status.model_dump_json()), stream=SYNC_STREAM)


@pytest.fixture
def answering(gateway: FakeGateway) -> Answering:
    return Answering(gateway)


@pytest.fixture
def code(client: Client, answering: Answering, repository: Path) -> Iterator[CodeSync]:
    code = CodeSync(client, Tree(repository))
    yield code
    code.close()


class Told:
    """What a watch tells, in order."""

    def __init__(self, code: CodeSync) -> None:
        self._heard: queue.Queue[SyncReport | Exception] = queue.Queue()
        self._code = code

    def __call__(self, outcome: SyncReport | Exception) -> None:
        self._heard.put(outcome)

    def next(self) -> Any:
        return self._heard.get(timeout=WAIT)


@pytest.fixture
def told(code: CodeSync, repository: Path) -> Told:
    """Of a watch that is up: what was saved before it has been told."""
    told = Told(code)
    code.push()
    (repository / "before").write_text("saved before the watch")
    code.watch(told)
    assert told.next().files == 1
    return told


def test_a_save_is_seen_from_another_folder_of_the_tree(
    told: Told, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository / "experiments")
    (repository / "src/model.py").write_text("STEP = 22\n")
    assert told.next().files == 1


def test_a_file_that_is_saved_all_the_time_is_named_once_and_then_no_news(told: Told, repository: Path) -> None:
    reports = []
    while not any(report.busy for report in reports):
        (repository / "train.log").write_text(f"{len(reports)} lines\n")
        reports.append(told.next())
    assert reports[-1].busy == ("train.log",)
    (repository / "train.log").write_text("and more\n")
    assert told.next().routine
    (repository / "src/model.py").write_text("STEP = 22\n")
    assert not told.next().routine


def test_what_was_saved_beside_a_mistake_follows_once_it_is_mended(
    told: Told, code: CodeSync, repository: Path
) -> None:
    link = repository / "experiments/data"
    link.symlink_to("/far/away")
    assert isinstance(told.next(), LinkLeavesTree)
    (repository / "src/model.py").write_text("STEP = 333\n")
    assert isinstance(told.next(), LinkLeavesTree)
    link.unlink()
    assert told.next().files == 1
    assert code.push().files == 0


def test_all_who_wait_for_a_version_hear_that_it_failed_and_the_next_push_offers_it_again(
    code: CodeSync, answering: Answering, gateway: FakeGateway
) -> None:
    answering.silent, answering.failed = True, {"workers-1": "its disk is full"}
    wait, waiting = code._wait, threading.Barrier(3)

    def told_that_it_waits(*arguments: Any) -> Any:
        waiting.wait(WAIT)
        return wait(*arguments)

    code._wait = told_that_it_waits  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as others:
        pushes = [others.submit(code.push) for _ in range(2)]
        waiting.wait(WAIT)
        assert answering.offered.wait(WAIT)
        gateway.do(lambda: answering.tell(gateway.session()))
        for push in pushes:
            with pytest.raises(StaleCodeError, match="workers-1: its disk is full"):
                push.result(WAIT)
    code._wait = wait  # type: ignore[method-assign]
    answering.silent, answering.failed = False, {}
    assert code.push().ready == 2
    assert answering.offers == 2


def test_what_meshgateignore_brings_back_is_seen_and_what_is_left_out_is_not(
    told: Told, code: CodeSync, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / ".meshgateignore").write_text("!.idea/\n")
    assert told.next().files == 1
    scans = []
    push = code._push
    monkeypatch.setattr(code, "_push", lambda changed: scans.append(changed) or push(changed))
    for folder in (".git", ".idea"):
        (repository / folder).mkdir()
        (repository / folder / "index").write_text("x")
    assert told.next().files >= 1
    assert not [path for changed in scans for path in changed or [] if ".git" in Path(path).parts]


def test_a_watch_that_cannot_go_on_says_so_and_can_be_begun_again(
    code: CodeSync, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("OS file watch limit reached.")

    told = Told(code)
    with monkeypatch.context() as patched:
        patched.setattr("watchfiles.watch", refuse)
        code.watch(told)
        error = told.next()
    assert isinstance(error, TreeError)
    assert "OS file watch limit reached" in str(error)
    code.watch(told)
    assert told.next().files
    shutil.rmtree(repository)
    while not isinstance(error := told.next(), Exception) or "is gone" not in str(error):
        pass
    repository.mkdir()
    (repository / "new").write_text("1")
    code.watch(told)
    assert told.next().files


def test_a_version_that_failed_while_nobody_waited_is_offered_again(code: CodeSync, answering: Answering) -> None:
    answering.failed = {"workers-1": "its pod is being deleted"}
    code.push(wait=False)
    with code._news:
        assert code._news.wait_for(lambda: any(status.failed for status in code._statuses.values()), WAIT)
    answering.failed = {}
    assert code.push().ready == 2
    assert answering.offers == 2
