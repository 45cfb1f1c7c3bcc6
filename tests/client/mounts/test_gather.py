"""What gather mounts copy, and when; real hosts are in ``tests/end_to_end/test_mounts.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshgate.errors import PullFailed
from meshgate.mounts.gather import GatherMount, GatherMounts
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
        self.closed = False
        self.slices: dict[int, FakeHosts] = {}

    def __len__(self) -> int:
        return self.count

    @property
    def sizes(self) -> dict[str, int]:
        return {"hosts": self.count}

    def slice(self, hosts: slice) -> FakeHosts:
        return self.slices.setdefault(hosts.start, FakeHosts(1, hosts.start))

    def spawn_procs(self, name: str) -> FakeHosts:
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
            rows = [(name, "file", len(data), 5, 0o644, "") for name, data in self.files.items()]
            return FutureProxy.resolved((f"host-{self.rank}", self.failure or rows))

        return type("Endpoint", (), {"call_one": staticmethod(call_one)})

    @property
    def read(self) -> Any:
        def call_one(path: str, name: str, offset: int, length: int, size: int, mtime: int) -> FutureProxy[Any]:
            assert size < 0, "files may grow"
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
