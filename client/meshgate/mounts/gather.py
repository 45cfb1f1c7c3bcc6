"""``job.gather_mount``: a copy on the laptop of directories of the hosts, which follows them.

What is new on a host, or has changed, is pulled again and again. So a file is complete when it appears, may be some
seconds old, and stays when the host removes it or ends.

Only threads of ``in_threads`` wait for hosts or hold a host's lock. The program's threads wait for those, so that a
signal handler can end a job at any point, also during a round.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from meshgate.errors import PullFailed
from meshgate.mounts import forget_handle, open_handles
from meshgate.mounts.remote import meshes_of, single_hosts
from meshgate.transfer.download import STOP_TIMEOUT, Download, HostFiles, Pulled, StopSignal, in_threads
from meshgate.transfer.on_host import FileReader

if TYPE_CHECKING:
    from meshgate.proxies import HostMeshProxy

INTERVAL = 5.0  # seconds between two rounds
TIMEOUT = 60.0  # seconds without a byte or a complete host, after which the last copy is given up
EXIT_TIMEOUT = 1.0  # seconds that a round has to stop and report at the end of a program that has not ended its job


@dataclass(frozen=True, slots=True)
class GatherMount:
    """``remote`` of each host of ``meshes`` (None: of all) appears in a directory of its own below ``local``."""

    remote: str
    local: str
    meshes: tuple[str, ...] | None = None

    @classmethod
    def from_arguments(cls, remote: str, local: str, meshes: Sequence[str] | None) -> GatherMount:
        """Raises ValueError."""
        if not remote.startswith("/"):
            raise ValueError(f"gather_mount({remote!r}): name an absolute path on the hosts")
        if os.path.lexists(local) and not os.path.isdir(local):
            raise ValueError(f"gather_mount(…, {local!r}): it exists and is not a directory")
        return cls(remote, os.path.abspath(local), None if meshes is None else tuple(meshes))

    def tops(self, of: Collection[str]) -> dict[str, str]:
        """The directory below which the hosts of each mesh have theirs, in a job that has the meshes ``of``."""
        meshes = meshes_of("gather_mount", self.meshes, of)
        return {mesh: os.path.join(self.local, mesh) if len(meshes) > 1 else self.local for mesh in meshes}


class GatherMounts:
    """The gather mounts of one job. ``start`` begins, ``close`` ends with what is there then."""

    def __init__(self) -> None:
        self._mounts: list[GatherMount] = []
        self._hosts: list[_Host] = []
        self._meshes: Mapping[str, HostMeshProxy] = {}
        self._thread: threading.Thread | None = None
        self._stop = StopSignal()  # of the rounds; ``close`` replaces it
        self._reported: set[str] = set()

    def add(self, mount: GatherMount) -> None:
        if mount not in self._mounts:
            self._mounts.append(mount)

    def start(self, meshes: Mapping[str, HostMeshProxy]) -> None:
        """Pulls what is there now, and from then on what changes. Raises PullFailed, and ValueError if the job does not
        have a mesh or two meshes have one directory here."""
        mesh_at: dict[str, str] = {}
        for mount in self._mounts:
            for mesh, top in mount.tops(meshes).items():
                if (other := mesh_at.setdefault(top, mesh)) != mesh:
                    raise ValueError(
                        f"gather_mount(…, {mount.local!r}): the hosts of {other!r} and {mesh!r} would overwrite each "
                        "other's files there; pass another directory for one of them, or both meshes in one call"
                    )
        if meshes != self._meshes:
            self._meshes = dict(meshes)
            self._hosts = [_Host(mesh, *host) for mesh, hosts in meshes.items() for host in single_hosts(hosts)]
        stop = self._stop
        self._pull(stop)
        if stop is not self._stop:  # a signal handler has closed it during the round
            return
        if self._thread is None or not self._thread.is_alive():  # it ends with all sessions
            atexit.register(self.stop)  # after the sessions' own function, so it runs before that
            self._thread = threading.Thread(target=self._follow, args=(stop,), name="meshgate-gather", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the rounds, and gives up the one in progress; copies once more. Gives that up without a connection, and
        once nothing has arrived for ``TIMEOUT``. Raises PullFailed that names the hosts whose files may be missing."""
        atexit.unregister(self.stop)
        stop, self._stop = self._stop, StopSignal()
        stop.set("the mount was closed")
        hosts = [(host, self._targets(host)) for host in self._hosts]
        self._hosts, self._meshes, self._thread = [], {}, None
        last = StopSignal()
        try:
            runs = in_threads(partial(host.end, targets, last) for host, targets in hosts)
            _wait_while_files_arrive([host for host, _ in hosts], runs)
            last.set(f"nothing has arrived for {TIMEOUT:.0f} s")
            wait(runs, STOP_TIMEOUT)
        except BaseException:
            last.set("the last copy was interrupted")
            _report(f"{last.reason}: new files of {_names(host for host, _ in hosts)} may be missing")
            raise
        missing: dict[str, list[_Host]] = {}
        for (host, _), run in zip(hosts, runs, strict=True):
            error = run.exception() if run.done() else last.reason
            if error is not None:
                missing.setdefault(str(error), []).append(host)
        if missing:
            why = "; ".join(f"{_names(those)} ({reason})" for reason, those in missing.items())
            raise PullFailed(f"files that are new or have changed since the last copy may be missing from {why}")

    def stop(self) -> None:
        """Gives up the round in progress, which reports that, and begins no other. For the end of the program."""
        self._stop.set("the program has ended")
        if self._thread is not None:
            self._thread.join(EXIT_TIMEOUT)

    def _pull(self, stop: StopSignal) -> Pulled:
        """One round. Raises an error of a host once it has tried all."""
        runs = in_threads(partial(host.pull, self._targets(host), stop) for host in self._hosts)
        wait(runs)
        return sum((run.result() for run in runs), Pulled())

    def _targets(self, host: _Host) -> list[tuple[str, str]]:
        """The directories of ``host`` to pull, each with the local one."""
        targets = []
        for mount in self._mounts:
            if top := mount.tops(self._meshes).get(host.mesh):
                targets.append((mount.remote.replace("$SUBDIR", host.key), os.path.join(top, host.key, "")))
        return targets

    def _follow(self, stop: StopSignal) -> None:
        while not stop.wait(INTERVAL):
            if all(hosts._client.closed for hosts in self._meshes.values()):
                return
            try:
                self._pull(stop)
            except Exception as error:  # noqa: BLE001 - whatever it was, the next round tries again
                if stop is not self._stop:  # ``close`` reports what is missing
                    return
                if stop.reason:
                    _report(f"{stop.reason} during a copy: new files of {_names(self._hosts)} may be missing")
                    return
                if str(error) not in self._reported:
                    self._reported.add(str(error))
                    _report(str(error))


class _Host:
    """One host, and the actor there that reads its files."""

    def __init__(self, mesh: str, host: HostMeshProxy, key: str) -> None:
        self.mesh, self.key = mesh, key
        self.received = 0  # bytes
        self._host = host
        self._procs: Any = None
        self._reader: Any = None
        self._lock = threading.Lock()  # one copy at a time

    @property
    def stopped(self) -> bool:
        """Whether the program has shut the host down."""
        return bool(self._host._owned.remote.stopped)

    def pull(self, targets: Sequence[tuple[str, str]], stop: StopSignal) -> Pulled:
        """Copies each directory that exists. Raises PullFailed; the next call starts another reader then."""
        with self._lock:
            return Pulled() if self.stopped else self._pull(targets, stop)

    def end(self, targets: Sequence[tuple[str, str]], stop: StopSignal) -> Pulled:
        """Copies once more, unless the host cannot be reached now, and ends the reader. Raises PullFailed."""
        with self._lock:
            client: Any = self._host._client
            try:
                if client.closed:
                    raise PullFailed("the session has ended")
                if self.stopped:
                    raise PullFailed("the hosts were shut down before")
                if not client.connected:
                    raise PullFailed("there is no connection")
                return self._pull(targets, stop)
            finally:
                self._end_reader()

    def _pull(self, targets: Sequence[tuple[str, str]], stop: StopSignal) -> Pulled:
        total = Pulled()
        for remote, local in targets:
            stop.check("", remote)
            if self._reader is None:
                self._procs = self._host.spawn_procs(name="meshgate_gather")
                self._reader = self._procs.spawn("meshgate_gather", FileReader)
            source = HostFiles(self._reader, remote, growing=True)
            try:
                total += Download(source, remote, local, self._advance, stop=stop, skip_changed=True).run()
            except Exception as error:
                if isinstance(error, PullFailed) and error.absent:
                    continue
                if not stop.reason:  # if it is stopped, the last copy needs the reader
                    self._end_reader()
                raise
        return total

    def _advance(self, count: int) -> None:
        self.received += count

    def _end_reader(self) -> None:
        procs, self._procs, self._reader = self._procs, None, None
        if procs is not None and not self._host._client.closed:
            procs.stop()


def _wait_while_files_arrive(hosts: Sequence[_Host], runs: Sequence[Future[Pulled]]) -> None:
    """Returns when ``runs`` are complete, or when for ``TIMEOUT`` none was and no byte arrived."""

    def progress() -> tuple[int, int]:
        return sum(run.done() for run in runs), sum(host.received for host in hosts)

    before = progress()
    while wait(runs, TIMEOUT).not_done and (now := progress()) != before:
        before = now


def _names(hosts: Iterable[_Host]) -> str:
    return ", ".join(f"{host.key or 'the host'} of {host.mesh}" for host in hosts)


def _report(problem: str) -> None:
    print(f"meshgate: gather_mount: {problem}", file=sys.stderr)  # noqa: T201 - for the user's terminal


class GatherHandle:
    """What ``gather_mount`` returns: the hosts' files are here, and follow until ``close`` or the end of a ``with``."""

    def __init__(self, host_mesh: HostMeshProxy, remote_mount_point: str, local_mount_point: str) -> None:
        self.hosts = host_mesh
        self._mounts = GatherMounts()
        self._mounts.add(GatherMount.from_arguments(remote_mount_point, local_mount_point, None))
        self._mounts.start({host_mesh._name: host_mesh})
        open_handles.append(self)

    def close(self, *, deadline: float | None = None) -> None:
        """Copies once more, whatever the ``deadline``, unless there is no connection or nothing arrives for a minute.
        The files stay. Raises PullFailed that names the hosts whose files may be missing."""
        forget_handle(self)
        self._mounts.close()

    def __enter__(self) -> GatherHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
