"""What gather mounts copy, and when; real hosts are in ``tests/end_to_end/test_mounts.py``."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from meshgate.errors import PullFailed, SupervisionError
from meshgate.mounts.gather import GatherMount, GatherMounts, _wait_while_files_arrive
from meshgate.session.futures import FutureProxy


class FakeHosts:
    """A mesh of hosts, its processes and its readers in one. ``files`` are below ``/out``; ``failure`` is the reply."""

    def __init__(self, count: int, rank: int = 0) -> None:
        self.count, self.rank = count, rank
        self.files: dict[str, bytes] = {}
        self.failure: tuple[str, str] | None = None
        self.replies: dict[str, tuple[str, str]] = {}  # to reads of a file
        self.asked: list[str] = []
        self.spawned = self.stopped = 0
        self.closed, self.connected = False, True
        self.shut_down = ""
        self.before_listing: Callable[[], FutureProxy[Any] | None] = lambda: None  # may reply in its place
        self.slices: dict[int, FakeHosts] = {}

    def __len__(self) -> int:
        return self.count

    @property
    def sizes(self) -> dict[str, int]:
        return {"hosts": self.count}

    def slice(self, hosts: slice) -> FakeHosts:
        return self.slices.setdefault(hosts.start, FakeHosts(1, hosts.start))

    @property
    def _owned(self) -> Any:
        return SimpleNamespace(remote=SimpleNamespace(stopped=self.shut_down))

    def spawn_procs(self, name: str) -> FakeHosts:
        if self.shut_down:
            raise RuntimeError(self.shut_down)
        self.spawned += 1
        return self

    def spawn(self, name: str, Class: type) -> FakeHosts:
        return self

    def stop(self) -> None:
        self.stopped += 1

    @property
    def _client(self) -> Any:
        return self

    @property
    def listing(self) -> Any:
        def call_one(path: str) -> FutureProxy[Any]:
            self.asked.append(path)
            if (reply := self.before_listing()) is not None:
                return reply
            rows = [(name, "file", len(data), 5, 0o644, "") for name, data in self.files.items()]
            return FutureProxy.resolved((f"host-{self.rank}", self.failure or rows))

        return type("Endpoint", (), {"call_one": staticmethod(call_one)})

    @property
    def read(self) -> Any:
        def call_one(path: str, name: str, offset: int, length: int, *expected: int) -> FutureProxy[Any]:
            assert expected[-1] is True, "files may grow"
            return FutureProxy.resolved(self.replies.get(name) or self.files[name][offset : offset + length])

        return type("Endpoint", (), {"call_one": staticmethod(call_one)})


@pytest.fixture
def mounts(tmp_path: Path) -> GatherMounts:
    mounts = GatherMounts()
    mounts.add(GatherMount("/out/$SUBDIR", str(tmp_path / "here")))
    return mounts


def test_each_host_has_a_directory_of_its_own(mounts: GatherMounts, tmp_path: Path) -> None:
    hosts: Any = FakeHosts(2)
    hosts.slice(hosts=slice(1, 2)).files = {"log": b"1"}
    mounts.start({"workers": hosts})
    assert (tmp_path / "here/hosts_1/log").read_bytes() == b"1"
    assert hosts.slices[0].asked == ["/out/hosts_0"]
    hosts.slices[0].files = {"log": b"0"}
    mounts.close()
    assert (tmp_path / "here/hosts_0/log").read_bytes() == b"0"
    assert (hosts.slices[0].spawned, hosts.slices[0].stopped) == (1, 1)
    mounts.close()


def test_several_meshes_have_a_directory_each(mounts: GatherMounts, tmp_path: Path) -> None:
    meshes: Any = {"a": FakeHosts(1), "b": FakeHosts(1)}
    for hosts in meshes.values():
        hosts.slice(hosts=slice(0, 1)).files = {"log": b"x"}
    mounts.start(meshes)
    mounts.close()
    assert sorted(str(path.relative_to(tmp_path / "here")) for path in tmp_path.rglob("log")) == [
        "a/hosts_0/log",
        "b/hosts_0/log",
    ]


def test_two_meshes_may_not_have_one_directory(tmp_path: Path) -> None:
    meshes: Any = {"a": FakeHosts(1), "b": FakeHosts(1)}
    mounts = GatherMounts()
    for mesh in meshes:
        mounts.add(GatherMount("/out", str(tmp_path), (mesh,)))
    for _ in range(2):
        with pytest.raises(ValueError, match="the hosts of 'a' and 'b' would overwrite each other's files there"):
            mounts.start(meshes)
    mounts.close()
    assert [hosts.slice(hosts=slice(0, 1)).asked for hosts in meshes.values()] == [[], []]


def test_a_directory_that_is_not_there_yet_is_waited_for(mounts: GatherMounts) -> None:
    hosts: Any = FakeHosts(1)
    hosts.slice(hosts=slice(0, 1)).failure = ("absent", "")
    mounts.start({"workers": hosts})
    mounts.close()


def test_a_file_that_is_replaced_while_it_is_read_is_left_for_the_next_round(
    mounts: GatherMounts, tmp_path: Path
) -> None:
    hosts: Any = FakeHosts(1)
    host = hosts.slice(hosts=slice(0, 1))
    host.files, host.replies = {"log": b"1", "result": b"2"}, {"log": ("changed", "log")}
    mounts.start({"workers": hosts})
    assert sorted(path.name for path in (tmp_path / "here/hosts_0").iterdir()) == ["result"]
    host.replies = {}
    mounts.close()
    assert (tmp_path / "here/hosts_0/log").read_bytes() == b"1"


def test_a_host_that_fails_delays_no_other_and_gets_another_reader(mounts: GatherMounts, tmp_path: Path) -> None:
    hosts: Any = FakeHosts(2)
    hosts.slice(hosts=slice(0, 1)).failure = ("forbidden", "denied")
    hosts.slice(hosts=slice(1, 2)).files = {"log": b"1"}
    with pytest.raises(PullFailed, match="host-0 may not read /out/hosts_0"):
        mounts.start({"workers": hosts})
    assert (tmp_path / "here/hosts_1/log").exists()
    hosts.slices[0].failure = None
    mounts.start({"workers": hosts})
    mounts.close()
    assert (hosts.slices[0].spawned, hosts.slices[1].spawned) == (2, 1)


@pytest.fixture
def in_round(mounts: GatherMounts, monkeypatch: pytest.MonkeyPatch) -> FakeHosts:
    """The host of started mounts that does not reply to the round in progress."""
    monkeypatch.setattr("meshgate.mounts.gather.INTERVAL", 0.01)
    hosts: Any = FakeHosts(1)
    mounts.start({"workers": hosts})
    asked = threading.Event()

    def wait_for_ever() -> FutureProxy[Any]:
        asked.set()
        return FutureProxy()

    host: FakeHosts = hosts.slices[0]
    host.before_listing = wait_for_ever
    asked.wait()
    return host


def test_without_a_connection_the_end_gives_up_the_round_in_progress_and_copies_nothing(
    mounts: GatherMounts, in_round: FakeHosts, capsys: pytest.CaptureFixture[str]
) -> None:
    in_round.connected = False
    asked, follower = len(in_round.asked), mounts._thread
    with pytest.raises(PullFailed, match=r"may be missing from hosts_0 of workers \(there is no connection\)"):
        mounts.close()
    assert follower is not None
    follower.join(60)
    assert not follower.is_alive()
    assert (len(in_round.asked), in_round.stopped) == (asked, 1)
    assert capsys.readouterr().err == ""  # the error says it
    mounts.close()


def test_the_last_copy_continues_with_the_reader_of_a_round_that_it_has_stopped(
    mounts: GatherMounts, in_round: FakeHosts, tmp_path: Path
) -> None:
    in_round.files, in_round.before_listing = {"log": b"last"}, lambda: None
    mounts.close()
    assert (tmp_path / "here/hosts_0/log").read_bytes() == b"last"
    assert (in_round.spawned, in_round.stopped) == (1, 1)


def test_the_last_copy_from_a_host_that_does_not_reply_is_given_up(
    mounts: GatherMounts, in_round: FakeHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshgate.mounts.gather.TIMEOUT", 0.01)
    with pytest.raises(PullFailed, match=r"missing from hosts_0 of workers \(nothing has arrived for 0 s\)"):
        mounts.close()
    assert in_round.stopped == 1


def test_the_last_copy_goes_on_while_files_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    host: Any = SimpleNamespace(received=5)
    more = [0, 1, 1]

    def wait(runs: Sequence[Future[Any]], timeout: float) -> Any:
        host.received += more.pop()
        return SimpleNamespace(not_done=runs)

    monkeypatch.setattr("meshgate.mounts.gather.wait", wait)
    _wait_while_files_arrive([host], [Future()])
    assert not more


def test_hosts_that_keep_the_last_copy_from_being_complete_are_named_once_for_each_reason(
    mounts: GatherMounts, tmp_path: Path
) -> None:
    hosts: Any = FakeHosts(4)
    mounts.start({"workers": hosts})
    hosts.slices[0].connected = hosts.slices[1].connected = False
    hosts.slices[2].failure = ("forbidden", "denied")
    hosts.slices[3].files = {"log": b"3"}
    with pytest.raises(PullFailed) as raised:
        mounts.close()
    assert str(raised.value).startswith(
        "files that are new or have changed since the last copy may be missing from hosts_0 of workers, hosts_1 of "
        "workers (there is no connection); hosts_2 of workers (the worker process on host-2 may not read"
    )
    assert (tmp_path / "here/hosts_3/log").exists()
    assert [each.stopped for each in hosts.slices.values()] == [1, 1, 1, 1]


def test_the_end_after_the_session_names_what_may_be_missing(mounts: GatherMounts) -> None:
    hosts: Any = FakeHosts(1)
    mounts.start({"workers": hosts})
    hosts.slices[0].closed = True
    with pytest.raises(PullFailed, match="the session has ended"):
        mounts.close()
    assert hosts.slices[0].stopped == 0  # the session has stopped it


def test_hosts_that_were_shut_down_are_not_read_and_are_named_at_the_end(mounts: GatherMounts) -> None:
    hosts: Any = FakeHosts(1)
    mounts.start({"workers": hosts})
    asked = list(hosts.slices[0].asked)
    hosts.slices[0].shut_down = "the hosts were shut down"
    mounts.start({"workers": hosts})
    with pytest.raises(PullFailed, match="the hosts were shut down before"):
        mounts.close()
    assert hosts.slices[0].asked == asked


def test_an_interrupt_of_the_last_copy_is_reported(
    mounts: GatherMounts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts: Any = FakeHosts(1)
    mounts.start({"workers": hosts})
    monkeypatch.setattr(
        "meshgate.mounts.gather._wait_while_files_arrive", lambda *_: signal.raise_signal(signal.SIGINT)
    )
    with pytest.raises(KeyboardInterrupt):
        mounts.close()
    assert capsys.readouterr().err == (
        "meshgate: gather_mount: the last copy was interrupted: new files of hosts_0 of workers may be missing\n"
    )


def test_the_end_of_a_program_gives_up_the_round_in_progress_and_says_so(
    mounts: GatherMounts, in_round: FakeHosts, capsys: pytest.CaptureFixture[str]
) -> None:
    follower = mounts._thread
    mounts.stop()
    assert follower is not None
    follower.join(60)
    assert capsys.readouterr().err == (
        "meshgate: gather_mount: the program has ended during a copy: new files of hosts_0 of workers may be missing\n"
    )


def test_the_end_of_a_program_stops_mounts_that_are_open(mounts: GatherMounts, monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr("atexit.register", at_exit.append)
    monkeypatch.setattr("atexit.unregister", at_exit.remove)
    hosts: Any = FakeHosts(1)
    mounts.start({"workers": hosts})
    assert at_exit == [mounts.stop]
    mounts.close()
    assert at_exit == []


@contextlib.contextmanager
def handled(number: int, handle: Callable[[], None]) -> Iterator[None]:
    def handler(received: int, frame: FrameType | None) -> None:
        handle()

    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_a_signal_handler_can_end_mounts_during_a_round(mounts: GatherMounts, tmp_path: Path) -> None:
    hosts: Any = FakeHosts(1)
    host = hosts.slice(hosts=slice(0, 1))

    def interrupt() -> FutureProxy[Any]:
        host.before_listing, host.files = lambda: None, {"log": b"last"}
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        return FutureProxy()

    host.before_listing = interrupt
    with handled(signal.SIGUSR1, mounts.close), pytest.raises(PullFailed, match="the mount was closed"):
        mounts.start({"workers": hosts})
    assert (tmp_path / "here/hosts_0/log").read_bytes() == b"last"
    assert mounts._thread is None


def test_mounts_that_a_signal_handler_ends_after_a_round_stay_closed(
    mounts: GatherMounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts: Any = FakeHosts(1)
    monkeypatch.setattr(mounts, "_pull", lambda stop: mounts.close())
    mounts.start({"workers": hosts})
    assert mounts._thread is None


def test_a_signal_handler_can_end_mounts_during_the_last_copy(mounts: GatherMounts) -> None:
    hosts: Any = FakeHosts(1)
    mounts.start({"workers": hosts})
    never: FutureProxy[Any] = FutureProxy()

    def end() -> None:
        mounts.close()
        never.settle(lambda: ("host-0", []))

    def interrupt() -> FutureProxy[Any]:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        return never

    hosts.slices[0].before_listing = interrupt
    with handled(signal.SIGUSR1, end):
        mounts.close()
    assert hosts.slices[0].stopped == 1


def test_a_reader_that_was_lost_is_replaced_in_the_next_round(mounts: GatherMounts, tmp_path: Path) -> None:
    hosts: Any = FakeHosts(1)
    host = hosts.slice(hosts=slice(0, 1))
    mounts.start({"workers": hosts})
    error = SupervisionError("the reader died")

    def fail() -> None:
        raise error

    host.before_listing = fail
    with pytest.raises(SupervisionError, match="the reader died"):
        mounts.start({"workers": hosts})
    host.before_listing, host.files = lambda: None, {"log": b"1"}
    mounts.start({"workers": hosts})
    assert (tmp_path / "here/hosts_0/log").exists()
    assert (host.spawned, host.stopped) == (2, 1)
    mounts.close()


def test_whatever_a_round_raises_is_reported_and_the_next_one_is_tried(
    mounts: GatherMounts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("meshgate.mounts.gather.INTERVAL", 0.01)
    hosts: Any = FakeHosts(1)
    mounts.start({"workers": hosts})
    host = hosts.slices[0]
    left = [OSError("the disk is gone"), RuntimeError("shut down")]

    def fail() -> None:
        if left:
            raise left.pop()
        host.files = {"log": b"new"}

    host.before_listing = fail
    while not (tmp_path / "here/hosts_0/log").exists():
        mounts._stop.wait(0.01)
    assert capsys.readouterr().err == ("meshgate: gather_mount: shut down\nmeshgate: gather_mount: the disk is gone\n")
    mounts.close()


@pytest.mark.parametrize("interval", [0.01])
def test_changes_follow_and_a_problem_is_reported_once(
    mounts: GatherMounts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    interval: float,
) -> None:
    monkeypatch.setattr("meshgate.mounts.gather.INTERVAL", interval)
    hosts: Any = FakeHosts(1)
    mounts.start({"workers": hosts})
    host = hosts.slices[0]
    host.failure = ("forbidden", "denied")
    rounds = host.spawned
    while host.spawned < rounds + 3:
        mounts._stop.wait(interval)
    host.failure, host.files = None, {"log": b"new"}
    while not (tmp_path / "here/hosts_0/log").exists():
        mounts._stop.wait(interval)
    assert capsys.readouterr().err.count("may not read") == 1
    thread: Any = mounts._thread
    hosts.closed = True
    thread.join(60)
    assert not thread.is_alive()
    again: Any = FakeHosts(1)  # of another session
    mounts.start({"workers": again})
    again.slices[0].files = {"later": b"new"}
    while not (tmp_path / "here/hosts_0/later").exists():
        mounts._stop.wait(interval)
    again.closed = True


@pytest.mark.parametrize(
    ("remote", "local", "message"),
    [("out", "here", "name an absolute path on the hosts"), ("/out", "file", "it exists and is not a directory")],
)
def test_unusable_arguments_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: str, local: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=message):
        GatherMount.from_arguments(remote, local, None)
