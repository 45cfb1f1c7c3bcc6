"""One sync for each session, and what it prints."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from meshgate.code_sync import session_sync
from meshgate.code_sync.push import SyncReport
from meshgate.code_sync.session_sync import push_automatically, sync_for
from meshgate.progress import Block
from meshgate.proxies.client import Client
from meshgate.session.dialing import UrlDialer
from meshgate.session.settings import ClientSettings
from meshgate_sync.errors import TreeError
from tests.client.scripted_gateway import TOKEN, ScriptedGateway

REPORT = SyncReport("ab", 1, 7, 2, 2, 0.1)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for folder in (".git", "src", "other"):
        (tmp_path / "repository" / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "repository")
    return (tmp_path / "repository").resolve()


def test_a_session_keeps_its_sync_until_another_tree_is_named(client: Client, repository: Path) -> None:
    first = sync_for(client, None)
    assert first.tree.top == repository
    assert sync_for(client, None) is first
    other = sync_for(client, ["other"])
    assert (other is first, other.tree.top) == (False, repository / "other")
    assert sync_for(client, None) is other


def test_a_session_that_was_taken_over_gets_the_tree_of_this_program(client: Client, repository: Path) -> None:
    client.code_version = "ab" * 32  # which another program pushed
    push_automatically(client, ["src"], watch=False)
    assert sync_for(client, None).tree.top == repository / "src"
    push_automatically(client, ["other"], watch=False)  # a tree has been chosen
    assert sync_for(client, None).tree.top == repository / "src"


def test_import_paths_that_the_program_adds_are_synced(
    client: Client, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = sync_for(client, None)
    assert "src" not in sync.code.tree.paths
    monkeypatch.syspath_prepend(str(repository / "src"))
    assert "src" in sync_for(client, None).tree.paths


def test_a_watch_goes_on_after_a_sync_of_the_same_directories_with_other_import_paths(
    client: Client, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = sync_for(client, ["src", "other"])
    sync.code.watch(sync._report)
    monkeypatch.syspath_prepend(str(repository / "src"))
    assert sync_for(client, ["src", "other"]) is sync
    assert (sync.code.watching, sync.code._stop.is_set()) == (True, False)
    assert "src" in sync.code.tree.paths


def test_a_watch_continues_on_the_tree_that_is_named_next(
    client: Client, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sync_for(client, ["src"])
    first.code.watch(first._report)
    second = sync_for(client, ["other"])
    monkeypatch.setattr(second.code, "push", lambda **_: REPORT)
    second.push_and_wait(watch=False, quiet=True)
    assert second.code.watching
    third = sync_for(client, ["src"])
    monkeypatch.setattr(third.code, "push", lambda **_: REPORT)
    third.push_in_background(watch=False)
    assert third.code.watching
    sync_for(client, ["other"])  # its push fails
    fourth = sync_for(client, ["src"])
    monkeypatch.setattr(fourth.code, "push", lambda **_: REPORT)
    fourth.push_in_background(watch=False)
    assert fourth.code.watching


def test_reports_are_printed_unless_they_are_routine_or_quiet(
    client: Client, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sync = sync_for(client, None)
    sync._report(REPORT)
    sync._report(replace(REPORT, routine=True))
    sync._report(replace(REPORT, routine=True, busy=("train.log",)))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == str(REPORT)
    assert lines[1].startswith("meshgate: train.log is saved continuously")
    assert len(lines) == 2
    sync._quiet = True
    sync._report(REPORT)
    sync._report(TreeError("cannot watch the tree"))
    assert capsys.readouterr().err == "meshgate: sync failed: cannot watch the tree\n"


def test_a_sync_shows_how_far_it_is_unless_it_is_quiet(
    client: Client, repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Callable[[], str]] = []
    monkeypatch.setattr(session_sync, "Waiting", lambda text: shown.append(text) or Block())
    sync = sync_for(client, None)
    monkeypatch.setattr(sync.code, "push", lambda: REPORT)
    sync.push_and_wait(watch=False, quiet=True)
    assert (shown, capsys.readouterr().err) == ([], "")
    sync.push_and_wait(watch=False, quiet=False)
    assert capsys.readouterr().err.splitlines()[-1] == str(REPORT)
    assert shown[0]().startswith(f"syncing {repository}: ")
    reports: list[SyncReport] = []
    sync.push_and_wait(watch=False, quiet=False, show=reports.append)
    sync._report(REPORT)
    assert (reports, capsys.readouterr().err) == ([REPORT, REPORT], "")


def test_missing_modules_are_warned_of_once(
    client: Client, repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_sync, "directories_outside", lambda tree: ["/elsewhere"])
    monkeypatch.setattr(session_sync, "ignored_modules", lambda tree, ignores: [("_version", "src/_version.py")])
    sync = sync_for(client, None)
    for _ in range(2):
        sync.push_in_background(watch=False)
    outside, ignored, advice, rule = capsys.readouterr().err.splitlines()
    assert outside.startswith(f"meshgate: modules in /elsewhere are not synced because it is outside {repository};")
    assert "this program imports _version, but " in ignored
    assert advice == f"meshgate: to sync what is excluded, add to {repository / '.meshgateignore'}:"
    assert rule == "  !/src/_version.py"


def test_a_closed_session_that_synced_is_freed(
    gateway: ScriptedGateway, settings: ClientSettings, repository: Path
) -> None:
    client = Client.connect(UrlDialer(gateway.url, TOKEN), settings=settings)
    sync_for(client, None)
    client.close()
    freed = weakref.ref(client)
    del client
    gc.collect()
    assert freed() is None
