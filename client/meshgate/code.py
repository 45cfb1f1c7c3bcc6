"""Code follows live: what is saved here is what the next process over there runs.

A sync scans the tree, tells the gateway how it differs from the version before, and knows when every host has it. The
processes of a session are started from the version that was synced last; a spawn names it, so that no call
runs stale code even when nobody waited for the sync.
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

from meshgate.busy import BusyFiles
from meshgate.errors import StaleCodeError
from meshgate.project import Tree
from meshgate.serial import SerialThread
from meshgate.watching import watch
from meshgate_sync.errors import TreeError
from meshgate_sync.protocol import SyncGone, SyncNeed, SyncStatus, SyncWants
from meshgate_sync.scan import Scanner
from meshgate_sync.sender import Message, Sender
from meshgate_sync.stat_cache import StatCache
from meshgate_sync.tree import Directory, Node
from meshgate_wire import Fragments
from meshgate_wire.messages import SYNC_STREAM, Sync

if TYPE_CHECKING:
    from meshgate.client import Client

__all__ = ["CodeSync", "SyncReport"]

log = logging.getLogger("meshgate.code")

SYNC_TIMEOUT = 600.0
RESTLESS = 5  # times in a row that a file may have changed before it could be sent
_REMEMBERED = 64
_MOST_CHECKED = 100  # files whose syntax is checked: compiling takes a third of a millisecond, and more are no save
_FROM_GATEWAY: TypeAdapter[SyncNeed | SyncWants | SyncStatus] = TypeAdapter(
    Annotated[SyncNeed | SyncWants | SyncStatus, Field(discriminator="type")]
)


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One sync: ``files`` changed (of a first one: all), ``nbytes`` that left this machine, hosts that have it.

    Of a watch: ``busy`` are files that were found to be saved all the time; ``routine``: none but such were saved.
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
        took = f"{self.seconds * 1000:.0f} ms" if self.seconds < 1 else f"{self.seconds:.1f} s"
        return f"synced {files}, {_readable(self.nbytes)} → {self.ready}/{self.hosts} hosts in {took}"


@dataclass(frozen=True, slots=True)
class _Pushed:
    """A push that was not waited for: what is known of it so far, when it began, what had been sent before, and
    which files were read for it."""

    report: SyncReport
    begun: float
    sent_before: int
    read: tuple[str, ...]


class CodeSync:
    """The sync of one client. ``push`` may be called from any thread; one at a time runs."""

    def __init__(self, client: Client, tree: Tree, *, cache_file: Path | None = None) -> None:
        self.tree = tree
        self._client = client
        self._sender = Sender(tree.top)
        self._cache_file = cache_file
        cache = StatCache.load(str(cache_file)) if cache_file else None
        roots = [tree.top / part for part in tree.parts] or [tree.top]
        self._scanners = [Scanner(root, cache=cache if len(roots) == 1 else None) for root in roots]
        self._worker = SerialThread("meshgate-code")
        self._teller = SerialThread("meshgate-told")
        self._pushing = threading.Lock()
        self._statuses: dict[str, SyncStatus] = {}
        self._pushed: list[str] = []  # the newest last
        self._restless = 0
        self._busy = BusyFiles()
        self._news = threading.Condition()
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
        """Brings what is on disk now to every host. ``changed``: the only paths that may differ, if known; absolute, or
        below the top of the tree.

        From here on the session's processes are started from it. With ``wait`` it returns when every host has it, and
        raises StaleCodeError naming those that cannot; without, at once. Raises meshgate_sync.errors.TreeError.
        """
        pushed = self._push(changed)
        if not wait:
            self._save_cache(pushed)
            return pushed.report
        return self._finished(pushed, progress)

    def _push(self, changed: Iterable[str] | None) -> _Pushed:
        begun = time.perf_counter()
        with self._pushing:
            before = self._sender.bytes_sent
            self._forget_failed()
            tree, read = self._scan(changed)
            offered = self._sender.offer(tree)
            version = offered.root.hex()
            self._note(version, anew=bool(offered.messages))
            for message in offered.messages:
                self._post(message)
            self._client.code_version, self._client.code_paths = version, self.tree.paths
            for path in read if len(read) <= _MOST_CHECKED else ():
                _check_syntax(self.tree.top / path)
        report = SyncReport(version, offered.files, self._sender.bytes_sent - before, 0, 0, time.perf_counter() - begun)
        return _Pushed(report, begun, before, tuple(read))

    def _finished(self, pushed: _Pushed, progress: Callable[[SyncStatus], None] | None = None) -> SyncReport:
        """Waits until every host has it."""
        status = self._wait(pushed.report.version, progress)
        self._save_cache(pushed)
        return replace(
            pushed.report,
            version=status.root,
            nbytes=self._sender.bytes_sent - pushed.sent_before,
            ready=status.ready,
            hosts=status.hosts,
            seconds=time.perf_counter() - pushed.begun,
        )

    def _save_cache(self, pushed: _Pushed) -> None:
        if self._cache_file is not None and len(self._scanners) == 1 and pushed.read:
            self._scanners[0].cache.save(str(self._cache_file))

    def _note(self, version: str, *, anew: bool) -> None:
        """``anew``: it is offered, and what was said of it before counts no longer."""
        with self._news:
            if anew:
                self._statuses.pop(version, None)
            self._pushed = [*(known for known in self._pushed[-_REMEMBERED:] if known != version), version]
            self._statuses = {root: status for root, status in self._statuses.items() if root in self._pushed}

    def watch(self, told: Callable[[SyncReport | Exception], None]) -> None:
        """Pushes on every save, once for a burst, until ``close``; ``told`` hears of each, on a thread of its own.

        It hears as well when saves can no longer be seen; ``watch`` may be called again then.
        """
        if self._watching is None:
            self._watching = threading.Thread(target=self._watch, args=(told,), name="meshgate-watch", daemon=True)
            self._watching.start()

    def leaves_out(self, path: str) -> bool:
        """Whether the file ``path`` in the tree was left out of the last push by the rules of the tree."""
        return all(scanner.ignores(path) for scanner in self._scanners)

    def close(self) -> None:
        self._stop.set()
        watching = self._watching
        if watching is not None:
            watching.join(timeout=5)
        self._worker.close(timeout=5)
        with self._news:
            self._news.notify_all()
        self._teller.close(timeout=5)

    # --- scanning

    def _scan(self, changed: Iterable[str] | None) -> tuple[Directory, list[str]]:
        if not self.tree.parts:
            scan = self._scanners[0].scan(changed)
            return scan.tree, [os.fsdecode(path) for path in scan.read]
        nested: dict[bytes, Any] = {}
        read = []
        for part, scanner in zip(self.tree.parts, self._scanners, strict=True):
            scan = scanner.scan()
            read += [os.path.join(part, os.fsdecode(path)) for path in scan.read]
            *above, name = os.fsencode(part).split(b"/")
            inside = nested
            for directory in above:
                inside = inside.setdefault(directory, {})
            inside[name] = scan.tree
        return _directory(nested), read

    def _watch(self, told: Callable[[SyncReport | Exception], None]) -> None:
        whole = True
        try:
            for saved in watch(self._scanners, self._stop):
                try:
                    pushed = self._noted(self._push(None if whole or self.tree.parts else saved))
                    whole = False
                    if pushed.report.files:
                        self._teller.call(lambda pushed=pushed: self._tell(pushed, told))  # type: ignore[misc]
                except Exception as error:  # noqa: BLE001 - the user is told, and the next save is another chance
                    whole = True  # what changed this time will not be reported again
                    told(error)
        except Exception as error:  # noqa: BLE001 - the user is told, and may watch again
            self._watching = None
            told(error)

    def _noted(self, pushed: _Pushed) -> _Pushed:
        """With what it says of files that are saved all the time."""
        busy = tuple(self._busy.saved(pushed.read))
        routine = not busy and self._busy.hold_all(pushed.read)
        return replace(pushed, report=replace(pushed.report, busy=busy, routine=routine))

    def _tell(self, pushed: _Pushed, told: Callable[[SyncReport | Exception], None]) -> None:
        """Beside the watch: a host that is slow does not hold up the next save."""
        try:
            told(self._finished(pushed))
        except Exception as error:  # noqa: BLE001 - the user is told, and the next save is another chance
            if not self._stop.is_set():
                told(error)

    # --- talking

    def _post(self, message: Message) -> None:
        header, buffers = message
        self._client.post(Sync(body=header.model_dump_json()), buffers, stream=SYNC_STREAM)

    def _received(self, header: Sync, buffers: Sequence[Fragments]) -> None:
        """On the connection's thread."""
        message = _FROM_GATEWAY.validate_json(header.body)
        if isinstance(message, SyncStatus):
            with self._news:
                if message.root in self._pushed:
                    self._statuses[message.root] = message
                self._news.notify_all()
        else:
            self._worker.call(lambda: self._answer(message, buffers))

    def _answer(self, message: SyncNeed | SyncWants, buffers: Sequence[Fragments]) -> None:
        if isinstance(message, SyncNeed):
            for answer in self._sender.needed(message):
                self._post(answer)
        else:
            self._send_wanted(message, buffers[0].join())

    def _send_wanted(self, message: SyncWants, digests: bytes) -> None:
        """Sends what the gateway lacks. Where a file has changed since the scan, what it is now is another version, and
        that follows; a file that does not rest is named, and left to the next sync."""
        while (gone := self._send_pieces(self._sender.wanted(message, digests))) is not None:
            self._restless += 1
            why = f"{gone.path} changes faster than it can be sent" if self._restless > RESTLESS else ""
            try:
                newer = why or self._push(None).report.version != message.root
            except (TreeError, OSError) as error:
                newer = why = str(error)
            if newer:
                self._post((gone.model_copy(update={"why": why[:4096]}), ()))
                return
        self._restless = 0

    def _send_pieces(self, answers: Iterable[Message]) -> SyncGone | None:
        for answer in answers:
            if isinstance(answer[0], SyncGone):
                return answer[0]
            self._post(answer)
        return None

    def _wait(self, version: str, progress: Callable[[SyncStatus], None] | None) -> SyncStatus:
        """Until every host has ``version``, or one that was pushed after it."""
        status = self._outcome(version, progress)
        if status.failed:
            self._forget(status)
            raise StaleCodeError(_failed(status), tuple(status.failed))
        return status

    def _outcome(self, version: str, progress: Callable[[SyncStatus], None] | None) -> SyncStatus:
        """The status with which a push of ``version`` ends, well or not."""
        deadline = time.monotonic() + SYNC_TIMEOUT
        told: SyncStatus | None = None
        with self._news:
            while True:
                for status in self._statuses_since(version):
                    if status.hosts and status.ready >= status.hosts and not status.failed:
                        return status
                newest = self._statuses.get(self._pushed[-1])
                if newest is not None and newest is not told:
                    told = newest
                    if progress is not None:
                        progress(newest)
                    if newest.failed:
                        return newest
                if self._client.error is not None:
                    raise self._client.error
                if (newest is None or not newest.hosts) and (why := self._client.objects.unattached()):
                    raise StaleCodeError(f"version {version[:12]} of the code got to no host: {why}")
                if self._stop.is_set():
                    raise StaleCodeError(f"the sync was ended before version {version[:12]} was everywhere")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise StaleCodeError(_late(version, newest))
                self._news.wait(min(left, 0.5))

    def _forget(self, failed: SyncStatus) -> None:
        """Has the next push offer the version again, whatever the tree is then. Until it does the status stays, for all
        who wait for this push."""
        with self._pushing:
            if self._statuses.get(failed.root) is failed:
                self._sender.forget(bytes.fromhex(failed.root))

    def _forget_failed(self) -> None:
        """Has versions that failed offered again, those too for which nobody waited: hosts may be back by now."""
        with self._news:
            failed = [status.root for status in self._statuses.values() if status.failed]
        for root in failed:
            self._sender.forget(bytes.fromhex(root))

    def _statuses_since(self, version: str) -> list[SyncStatus]:
        """Of ``version`` and those pushed after it, the newest first."""
        start = self._pushed.index(version) if version in self._pushed else 0
        return [self._statuses[root] for root in reversed(self._pushed[start:]) if root in self._statuses]


def _directory(nested: Mapping[bytes, Any]) -> Directory:
    entries: dict[bytes, Node] = {
        name: node if isinstance(node, Directory) else _directory(node) for name, node in nested.items()
    }
    return Directory(entries)


def _check_syntax(path: Path) -> None:
    """A mistake in a saved file is told at once; the sync goes on, for the next save will mend it."""
    if path.suffix != ".py":
        return
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        print(f"meshgate: {path}:{error.lineno}: {error.msg}", file=sys.stderr)  # noqa: T201 - for the user's terminal
    except (OSError, ValueError) as error:
        log.debug("%s could not be checked: %s", path, error)


def _late(version: str, status: SyncStatus | None) -> str:
    ready = f"{status.ready} of {status.hosts} hosts have it" if status else "no host has answered"
    return f"version {version[:12]} is not everywhere after {SYNC_TIMEOUT:.0f} s: {ready}"


def _failed(status: SyncStatus) -> str:
    reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(status.failed.items())[:8])
    more = f" (and {len(status.failed) - 8} more)" if len(status.failed) > 8 else ""
    return f"version {status.root[:12]} of the code did not get to {len(status.failed)} hosts: {reasons}{more}"


def _readable(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError
