"""Pushes the tree to the gateway: a process spawned after a push runs the pushed code.

A push scans the tree and sends the gateway its difference from the previous version; the gateway reports when every
host has it. A spawn names the version that was pushed last, so no call runs stale code even if no caller waited for
the push.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter

from meshgate.caller import warn_caller
from meshgate.code_sync.project import Tree
from meshgate.code_sync.watcher import BusyFiles, watch
from meshgate.errors import GatewayError, MeshFailure, StaleCodeError, StepFailedError, SupervisionError, copy_of
from meshgate.progress import size_text
from meshgate.session.serial_thread import SerialThread
from meshgate_sync.errors import TreeError
from meshgate_sync.tree.scan import Limits, Scanner, StatCache
from meshgate_sync.tree.tree import Directory, Node
from meshgate_sync.upload import Message, Patience, Sender, SyncGone, SyncNeed, SyncStatus, SyncWants
from meshgate_wire import Fragments
from meshgate_wire.messages import SYNC_STREAM, Sync

if TYPE_CHECKING:
    from meshgate.session.session import ClientSession


log = logging.getLogger("meshgate.code_sync.push")

MAX_CONSECUTIVE_CHANGES = 5  # how often in a row a file may change before it could be sent
_MAX_SYNTAX_CHECKS = 100  # files; compiling one takes a third of a millisecond, and an edit touches few
_FROM_GATEWAY: TypeAdapter[SyncNeed | SyncWants | SyncStatus] = TypeAdapter(
    Annotated[SyncNeed | SyncWants | SyncStatus, Field(discriminator="type")]
)


SYNC_TIMEOUT = 600.0  # seconds without progress, while the session is connected
_REMEMBERED = 64  # versions
_LISTED_HOSTS = 8  # in an error message


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One sync: the number of changed ``files`` (all of them in a first sync), the bytes that left this machine, and
    how many hosts have the version.

    While watching, ``busy`` lists files that have just been found to be saved continuously, and ``routine`` is True if
    only such files were saved.
    """

    version: str
    files: int
    nbytes: int
    ready: int
    hosts: int
    seconds: float
    busy: tuple[str, ...] = ()
    routine: bool = False

    def __str__(self) -> str:
        files = f"{self.files} file" + ("" if self.files == 1 else "s")
        duration = f"{self.seconds * 1000:.0f} ms" if self.seconds < 1 else f"{self.seconds:.1f} s"
        return f"synced {files}, {size_text(self.nbytes)} → {self.ready}/{self.hosts} hosts in {duration}"


@dataclass(frozen=True, slots=True)
class _PendingPush:
    """A push that has been sent: its report so far, when it began, the sender's byte count before it, and the files
    that were read for it."""

    report: SyncReport
    started: float
    bytes_before: int
    read: tuple[str, ...]


class CodeSync:
    """The sync of one client. ``push`` is thread-safe; pushes run one at a time. The stat cache is ``cache``, or kept
    in ``cache_file``."""

    DATA_LIMITS = Limits(bytes=10_000_000_000)
    """Of a tree with everything."""

    def __init__(
        self, client: ClientSession, tree: Tree, *, cache_file: Path | None = None, cache: StatCache | None = None
    ) -> None:
        self.tree = tree
        self._client = client
        self._sender = Sender(tree.top)
        self._cache_file = cache_file
        if cache_file is not None:
            cache = StatCache.load(str(cache_file))
        roots = tree.roots
        self._scanners = [
            Scanner(
                root,
                cache=cache if len(roots) == 1 else None,
                limits=self.DATA_LIMITS if tree.everything else None,
                everything=tree.everything,
            )
            for root in roots
        ]
        self._sender_thread = SerialThread("meshgate-code")
        self._report_thread = SerialThread("meshgate-sync-reports")
        self._pushing = threading.Lock()
        objects = client.objects
        self._checks = SessionChecks(
            lambda: client.error, objects.attach_failures, objects.ranks_of_hosts, self._progress
        )
        self._versions = PushedVersions(self._checks)
        self._consecutive_changes = 0
        self._busy = BusyFiles()
        self._watching: threading.Thread | None = None
        self._stop = threading.Event()
        client.on_sync(self._received)
        client.before_close(self.close)

    def push(
        self,
        changed: Iterable[str] | None = None,
        *,
        wait: bool = True,
        progress: Callable[[SyncStatus], None] | None = None,
    ) -> SyncReport:
        """Sends what is on disk now to every host; from now on the session spawns processes from it.

        ``changed``: the only paths that may differ, if known; absolute or relative to the top of the tree. With
        ``wait``, returns when every host has the version, and raises StaleCodeError that names the hosts that cannot
        get it, SupervisionError if these were lost, or StepFailedError if no hosts could be attached. Otherwise it
        returns at once. Raises TreeError.
        """
        push = self._push(changed)
        if not wait:
            self._save_cache(push)
            return push.report
        return self._wait(push, progress)

    def watch(self, on_report: Callable[[SyncReport | Exception], None]) -> None:
        """Pushes once for each burst of saves until ``close``; passes each result to ``on_report`` on another thread.

        If watching fails, ``on_report`` gets the TreeError and ``watch`` may be called again.
        """
        if self._watching is None:
            self._watching = threading.Thread(target=self._watch, args=(on_report,), name="meshgate-watch", daemon=True)
            self._watching.start()

    @property
    def watching(self) -> bool:
        return self._watching is not None

    def ignores(self, path: str) -> bool:
        """Whether the rules of the tree excluded the file ``path`` from the last push."""
        return all(scanner.ignores(path) for scanner in self._scanners)

    def close(self) -> None:
        self._stop.set()
        self._versions.close()
        watching = self._watching
        if watching is not None:
            watching.join(timeout=5)
        self._sender_thread.close(timeout=5)
        self._report_thread.close(timeout=5)

    def follow(self) -> Callable[[], str]:
        """A function that returns how far a push from now on has come."""
        sent_before = self._sender.bytes_sent

        def progress() -> str:
            if self._pushing.locked():
                return f"syncing {self.tree.top}: reading its files"
            status = self._versions.newest()
            ready = (
                f"{status.ready} of {status.hosts} hosts have it" if status and status.hosts else "no host has it yet"
            )
            return f"syncing {self.tree.top}: {size_text(self._sender.bytes_sent - sent_before)} sent, {ready}"

        return progress

    # --- pushing

    def _progress(self) -> int | None:
        """How many bytes were sent; None without a connection."""
        return self._sender.bytes_sent if self._client.connected else None

    def _push(self, changed: Iterable[str] | None) -> _PendingPush:
        started = time.perf_counter()
        with self._pushing:
            bytes_before = self._sender.bytes_sent
            for version in self._versions.failed():  # offer it again even if the tree is unchanged: hosts may be back
                self._sender.forget(bytes.fromhex(version))
            tree, read = self._scan(changed)
            try:
                offer = self._sender.offer(tree)
                version = offer.root.hex()
                self._versions.add(version, reset=bool(offer.messages))
                for message in offer.messages:
                    self._post(message)
            except BaseException:  # such as Ctrl-C: what may not have been posted is offered again
                self._sender.forget(tree.digest)
                raise
            self._client.code_version, self._client.code_paths = version, self.tree.paths
            for path in read if len(read) <= _MAX_SYNTAX_CHECKS and not self.tree.everything else ():
                _check_syntax(self.tree.top / path)
        nbytes = self._sender.bytes_sent - bytes_before
        report = SyncReport(version, offer.files, nbytes, 0, 0, time.perf_counter() - started)
        return _PendingPush(report, started, bytes_before, tuple(read))

    def _wait(self, push: _PendingPush, progress: Callable[[SyncStatus], None] | None = None) -> SyncReport:
        status = self._versions.wait(push.report.version, progress)
        raise_if_failed(status, self._checks)
        self._save_cache(push)
        return replace(
            push.report,
            version=status.root,
            nbytes=self._sender.bytes_sent - push.bytes_before,
            ready=status.ready,
            hosts=status.hosts,
            seconds=time.perf_counter() - push.started,
        )

    def _save_cache(self, push: _PendingPush) -> None:
        if self._cache_file is not None and len(self._scanners) == 1 and push.read:
            try:
                self._scanners[0].cache.save(str(self._cache_file))
            except OSError as error:  # the hosts have the version: only the next program's scan takes longer
                warn_caller(
                    f"cannot save what was read of {self.tree.top} in {self._cache_file}: {error.strerror}. The next "
                    "program reads all files again; set XDG_CACHE_HOME to a directory that can be written"
                )
                self._cache_file = None  # warns once

    def _scan(self, changed: Iterable[str] | None) -> tuple[Directory, list[str]]:
        """The tree, and the files that were read because they may have changed."""
        if not self.tree.parts:
            scan = self._scanners[0].scan(changed)
            return scan.tree, [os.fsdecode(path) for path in scan.read]
        nested: dict[bytes, Any] = {}
        read = []
        for part, scanner in zip(self.tree.parts, self._scanners, strict=True):
            scan = scanner.scan()
            read += [os.path.join(part, os.fsdecode(path)) for path in scan.read]
            *parents, name = os.fsencode(part).split(b"/")
            entries = nested
            for directory in parents:
                entries = entries.setdefault(directory, {})
            entries[name] = scan.tree
        return _directory(nested), read

    # --- watching

    def _watch(self, on_report: Callable[[SyncReport | Exception], None]) -> None:
        scan_all = True
        try:
            for saved in watch(self._scanners, self._stop):
                try:
                    push = self._with_busy_files(self._push(None if scan_all or self.tree.parts else saved))
                    scan_all = False
                    if push.report.files:
                        self._report_thread.call(lambda push=push: self._report(push, on_report))  # type: ignore[misc]
                except Exception as error:  # noqa: BLE001 - reported to the user; the next save tries again
                    scan_all = True  # the watcher will not yield these paths again
                    on_report(error)
        except Exception as error:  # noqa: BLE001 - reported to the user, who may call watch again
            self._watching = None
            on_report(error)

    def _with_busy_files(self, push: _PendingPush) -> _PendingPush:
        busy = tuple(self._busy.record_saves(push.read))
        routine = not busy and self._busy.contains_all(push.read)
        return replace(push, report=replace(push.report, busy=busy, routine=routine))

    def _report(self, push: _PendingPush, on_report: Callable[[SyncReport | Exception], None]) -> None:
        """Runs on the report thread, so that a slow host does not delay the push of the next save."""
        try:
            on_report(self._wait(push))
        except Exception as error:  # noqa: BLE001 - reported to the user; the next save tries again
            if not self._stop.is_set():
                on_report(error)

    # --- messages

    def _post(self, message: Message) -> None:
        header, buffers = message
        self._client.post(Sync(body=header.model_dump_json()), buffers, stream=SYNC_STREAM)

    def _received(self, header: Sync, buffers: Sequence[Fragments]) -> None:
        """Runs on the connection's thread."""
        message = _FROM_GATEWAY.validate_json(header.body)
        if isinstance(message, SyncStatus):
            self._versions.update(message)
        else:
            self._sender_thread.call(lambda: self._answer(message, buffers))

    def _answer(self, message: SyncNeed | SyncWants, buffers: Sequence[Fragments]) -> None:
        try:
            if isinstance(message, SyncNeed):
                self._send_pieces(self._sender.answer_need(message))
            else:
                self._send_wanted(message, buffers[0].join())
        except GatewayError:
            if not self._client.closed:  # otherwise the session has ended, or the program is ending it
                raise

    def _send_wanted(self, message: SyncWants, digests: bytes) -> None:
        """Sends the pieces that the gateway lacks, until the session ends.

        If a file has changed since the scan, pushes its new content as another version. Names a file that keeps
        changing as the reason why the version cannot be sent.
        """
        while (gone := self._send_pieces(self._sender.answer_wants(message, digests))) is not None:
            self._consecutive_changes += 1
            changing = self._consecutive_changes > MAX_CONSECUTIVE_CHANGES
            reason = f"{gone.path} changes faster than it can be sent" if changing else ""
            try:
                superseded = reason or self._push(None).report.version != message.root
            except (TreeError, OSError) as error:
                superseded = reason = str(error)
            if superseded:
                self._post((gone.model_copy(update={"why": reason[:4096]}), ()))
                return
        self._consecutive_changes = 0

    def _send_pieces(self, answers: Iterable[Message]) -> SyncGone | None:
        """Sends ``answers`` up to a file that has changed, and returns the message that names it."""
        for answer in answers:
            if self._client.closed:  # not `_stop`: after another tree was chosen, hosts may still wait for this one
                return None
            if isinstance(answer[0], SyncGone):
                return answer[0]
            self._post(answer)
        return None


def _directory(nested: Mapping[bytes, Any]) -> Directory:
    entries: dict[bytes, Node] = {
        name: node if isinstance(node, Directory) else _directory(node) for name, node in nested.items()
    }
    return Directory(entries)


def _check_syntax(path: Path) -> None:
    """Prints a syntax error in a saved file at once. The push continues: a later save will fix the file."""
    if path.suffix != ".py":
        return
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        print(f"meshgate: {path}:{error.lineno}: {error.msg}", file=sys.stderr)  # noqa: T201 - for the user's terminal
    except (RecursionError, MemoryError):
        print(f"meshgate: {path}: nested too deeply to be compiled", file=sys.stderr)  # noqa: T201
    except (OSError, ValueError) as error:
        log.debug("cannot check the syntax of %s: %s", path, error)


@dataclass(frozen=True, slots=True)
class SessionChecks:
    """``error`` returns why the session has ended, or None; ``attach_failure`` why no hosts are attached, or ``""``.
    ``ranks(hosts)`` returns the mesh of these hosts, and the hosts by rank. ``progress`` returns another value after
    code was sent, and None without a connection."""

    error: Callable[[], BaseException | None]
    attach_failure: Callable[[], str]
    ranks: Callable[[Iterable[str]], tuple[str, dict[int, str]]]
    progress: Callable[[], int | None]


class PushedVersions:
    """Statuses of pushed versions. Thread-safe."""

    def __init__(self, session: SessionChecks) -> None:
        self._session = session
        self._statuses: dict[str, SyncStatus] = {}
        self._order: list[str] = []  # the newest last
        self._changed = threading.Condition()
        self._closed = False

    def add(self, version: str, *, reset: bool) -> None:
        """Makes ``version`` the newest. ``reset`` discards its earlier status, because it is offered again."""
        with self._changed:
            if reset:
                self._statuses.pop(version, None)
            self._order = [*(known for known in self._order[-_REMEMBERED:] if known != version), version]
            self._statuses = {root: status for root, status in self._statuses.items() if root in self._order}

    def update(self, status: SyncStatus) -> None:
        with self._changed:
            if status.root in self._order:
                self._statuses[status.root] = status
            self._changed.notify_all()

    def failed(self) -> list[str]:
        """The versions that some host could not get."""
        with self._changed:
            return [status.root for status in self._statuses.values() if status.failed]

    def newest(self) -> SyncStatus | None:
        """The status of the newest version, if any host has reported it."""
        with self._changed:
            return self._statuses.get(self._order[-1]) if self._order else None

    def close(self) -> None:
        """Makes pending calls of ``wait`` raise."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait(self, version: str, progress: Callable[[SyncStatus], None] | None = None) -> SyncStatus:
        """Waits until every host has ``version`` or a newer one, or the newest has failed on a host.

        Returns that status. Raises StepFailedError if no host is attached, StaleCodeError after ``close`` or if nothing
        moved for ``SYNC_TIMEOUT``, and the session's error if it has ended.
        """
        reported: SyncStatus | None = None
        patience = Patience(SYNC_TIMEOUT, time.monotonic())
        with self._changed:
            while True:
                for status in self._statuses_since(version):
                    if status.hosts and status.ready >= status.hosts and not status.failed:
                        return status
                newest = self._statuses.get(self._order[-1])
                if newest is not None and newest is not reported:
                    reported = newest
                    if progress is not None:
                        progress(newest)
                    if newest.failed and self._session.error() is None:
                        return newest
                self._raise_if_hopeless(version, newest)
                moved = self._session.progress()
                if patience.ends(None if moved is None else (moved, reported), time.monotonic()):
                    raise StaleCodeError(_timeout_message(version, newest))
                self._changed.wait(patience.pause)

    def _raise_if_hopeless(self, version: str, newest: SyncStatus | None) -> None:
        if (error := self._session.error()) is not None:
            raise copy_of(error)
        if (newest is None or not newest.hosts) and (reason := self._session.attach_failure()):
            raise StepFailedError(
                f"no host received code version {version[:12]} because an earlier step failed: attaching the hosts\n"
                f"{reason}",
                "attaching the hosts",
            )
        if self._closed:
            raise StaleCodeError(f"the sync was closed before every host had code version {version[:12]}")

    def _statuses_since(self, version: str) -> list[SyncStatus]:
        """The known statuses of ``version`` and later ones, the newest first."""
        start = self._order.index(version) if version in self._order else 0
        return [self._statuses[root] for root in reversed(self._order[start:]) if root in self._statuses]


def raise_if_failed(status: SyncStatus, session: SessionChecks) -> None:
    """Raises an error that names the hosts on which the version failed: SupervisionError if they were all lost, and
    StaleCodeError otherwise."""
    if not status.failed:
        return
    listed = sorted(status.failed.items())[:_LISTED_HOSTS]
    reasons = "; ".join(f"{name}: {reason}" for name, reason in listed)
    failures = max(status.failures, len(status.failed))
    more = f" (and {failures - len(listed)} more)" if failures > len(listed) else ""
    count = f"{failures} host" + ("" if failures == 1 else "s")
    if not set(status.failed) <= set(status.lost):
        message = f"code version {status.root[:12]} did not reach {count}: {reasons}{more}"
        raise StaleCodeError(message, tuple(status.failed))
    were, them = ("was", "it") if failures == 1 else ("were", "them")
    message = f"{count} {were} lost, so code version {status.root[:12]} did not reach {them}: {reasons}{more}"
    mesh, hosts = session.ranks(status.lost)
    raise SupervisionError(message, MeshFailure(mesh, f"{reasons}{more}", tuple(hosts), hosts), endpoint="sync")


def _timeout_message(version: str, status: SyncStatus | None) -> str:
    ready = f"{status.ready} of {status.hosts} hosts have it" if status else "no host has reported"
    return f"code version {version[:12]} did not reach every host: {ready}, and nothing moved for {SYNC_TIMEOUT:.0f} s"
