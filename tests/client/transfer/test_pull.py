"""Arguments that a pull rejects before it contacts a host, its progress, and its end by Ctrl-C."""

from __future__ import annotations

import contextlib
import io
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshgate import PullFailed
from meshgate.session.futures import FutureProxy
from meshgate.transfer.download import Entry, Pulled, StopSignal
from meshgate.transfer.pull import PullProgress, pull

HOSTS: Any = [0, 1]


def test_an_empty_remote_path_does_not_pull_the_working_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name a file or a directory"):
        pull(HOSTS, "", tmp_path)


@pytest.mark.parametrize("ranks", [2, -1, [0, 2], [], "0"])
def test_unknown_ranks_are_rejected(tmp_path: Path, ranks: Any) -> None:
    with pytest.raises(ValueError, match="the mesh has ranks 0 to 1"):
        pull(HOSTS, "/remote", tmp_path, ranks)


class UnreachableHosts:
    """A host, its processes and its reader in one, which never replies. Whoever asks it is interrupted."""

    def __len__(self) -> int:
        return 1

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self  # slice, spawn_procs, spawn, stop

    @property
    def listing(self) -> Any:
        def call_one(path: str) -> FutureProxy[Any]:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return FutureProxy()

        return SimpleNamespace(call_one=call_one)


def test_ctrl_c_ends_a_pull_from_hosts_that_do_not_reply(tmp_path: Path) -> None:
    hosts: Any = UnreachableHosts()
    with pytest.raises(KeyboardInterrupt):
        pull(hosts, "/remote", tmp_path)
    for thread in threading.enumerate():
        if thread.name == "meshgate-download":
            thread.join(60)
            assert not thread.is_alive()


def test_a_host_that_fails_ends_the_pull_from_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def host_files(hosts: Any, rank: int, remote: str) -> Iterator[Any]:
        def listing(stop: StopSignal) -> list[Entry]:
            if rank == 0:
                stop.wait()  # until the pull has failed
                stop.check("host-0", remote)
            raise PullFailed(f"{remote} does not exist on host-{rank}")

        yield SimpleNamespace(host=f"host-{rank}", listing=listing)

    monkeypatch.setattr("meshgate.transfer.pull._host_files", host_files)
    with pytest.raises(PullFailed, match="/remote does not exist on host-1"):
        pull(HOSTS, "/remote", tmp_path)


def test_an_unknown_kind_of_progress_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHGATE_PROGRESS", "loud")
    with pytest.raises(ValueError, match="MESHGATE_PROGRESS='loud': expected auto, plain or off"):
        pull(HOSTS, "/remote", tmp_path)


def test_one_line_is_printed_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("meshgate.transfer.pull.time", SimpleNamespace(monotonic=iter((100.0, 102.5)).__next__))
    with PullProgress("/data", "plain") as progress:
        progress.expect(10)
        progress.advance(10)
        progress.done(Pulled(2, 5_000_000, 999, tuple("abcdefg")))
    assert capsys.readouterr().err == (
        "pulled /data: 2 files, 5.0 MB, 999 B transferred, in 2.5 s; left out, as special files, links out of the "
        "directory and files removed meanwhile are: a, b, c, d, e and 2 more\n"
    )


def test_the_bar_shows_a_name_in_brackets_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, for rich
    monkeypatch.setenv("COLUMNS", "200")
    with PullProgress("runs/[bold]/[/x]/:x:", "live"):
        pass
    assert "pull runs/[bold]/[/x]/:x:" in screen.getvalue()


def test_nothing_is_printed_when_progress_is_off(capsys: pytest.CaptureFixture[str]) -> None:
    with PullProgress("/data", "off") as progress:
        progress.done(Pulled(1, 1, 1))
    assert capsys.readouterr().err == ""
