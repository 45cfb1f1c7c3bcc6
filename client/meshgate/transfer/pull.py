"""Copies files and directories, such as checkpoints and profiles, from workers to this machine.

A file appears under its name only when it is complete. An interrupted pull resumes where it stopped
(``PartialFile``), and files that are already here with their size and time are skipped. Nothing is ever written
outside of the local directory, whatever names a host reports (``destination``).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from types import TracebackType
from typing import TYPE_CHECKING

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from typing_extensions import Self

from meshgate.progress import Mode, new_console, progress_mode, report_stream, size_text
from meshgate.transfer.download import (
    STOP_TIMEOUT,
    Download,
    HostFiles,
    Pulled,
    StopSignal,
    in_threads,
)
from meshgate.transfer.on_host import FileReader

if TYPE_CHECKING:
    from meshgate.proxies import HostMeshProxy


def pull(
    hosts: HostMeshProxy, remote: str, local: str | os.PathLike[str], ranks: Sequence[int] | int | None = None
) -> Pulled:
    """Copies ``remote`` from the hosts ``ranks`` (None: all) to ``local``. Raises PullFailed.

    From one host, the contents of a directory go into ``local``; a file becomes ``local``, or goes into it if that is a
    directory or ends with ``/``. From several hosts, each gets a directory ``local/rank-<n>``.
    """
    chosen = _check_ranks(ranks, len(hosts))
    if not remote:
        raise ValueError("pull(''): name a file or a directory on the hosts; '.' is their working directory")
    mode = progress_mode(sys.stderr)
    top = os.fspath(local)
    several = len(chosen) > 1
    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(_host_files(hosts, rank, remote)) for rank in chosen]
        targets = [os.path.join(top, f"rank-{rank}", "") if several else top for rank in chosen]
        with PullProgress(remote, mode) as progress:
            stop = StopSignal()
            downloads = [
                Download(source, remote, target, progress.advance, progress.expect, stop)
                for source, target in zip(sources, targets, strict=True)
            ]
            runs: list[Future[Pulled]] = []
            try:
                runs = in_threads([download.run for download in downloads])
                wait(runs, return_when=FIRST_EXCEPTION)
                runs.sort(key=lambda run: not run.done())  # the one that failed before those that go on
                result = sum((run.result() for run in runs), Pulled())
            finally:  # also after Ctrl-C: the parts must be closed, so that the next pull can resume them
                stop.set("stopped because the pull was interrupted, or failed on another host")
                wait(runs, STOP_TIMEOUT)
            progress.done(result)
    return result


def _check_ranks(ranks: Sequence[int] | int | None, count: int) -> list[int]:
    """The ranks without duplicates. Raises ValueError on an unknown rank and on an empty sequence."""
    if ranks is None:
        ranks = range(count)
    chosen = [ranks] if isinstance(ranks, int) else list(dict.fromkeys(ranks))
    if not chosen or any(rank not in range(count) for rank in chosen):
        raise ValueError(f"ranks={ranks!r}: the mesh has ranks 0 to {count - 1}")
    return chosen


@contextlib.contextmanager
def _host_files(hosts: HostMeshProxy, rank: int, remote: str) -> Iterator[HostFiles]:
    procs = hosts.slice(hosts=slice(rank, rank + 1)).spawn_procs(name="meshgate_pull")
    try:
        yield HostFiles(procs.spawn("meshgate_pull", FileReader), remote)
    finally:
        procs.stop()


class PullProgress:
    """A context manager around a pull, which shows its progress on stderr. Thread-safe."""

    def __init__(self, title: str, mode: Mode) -> None:
        self._silent = mode == "off"
        self._started = time.monotonic()
        self._title = title
        self._lock = threading.Lock()
        self._expected = 0
        self._bar: Progress | None = None
        if mode == "live":
            title_column = TextColumn("{task.description}", markup=False)
            columns = (title_column, BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Progress(*columns, TimeRemainingColumn(), console=new_console(stderr=True), transient=True)
            self._task = self._bar.add_task(f"pull {title}", total=None)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def expect(self, count: int) -> None:
        """Adds ``count`` bytes to the expected total."""
        with self._lock:
            self._expected += count
        if self._bar is not None:
            self._bar.update(self._task, total=self._expected)

    def advance(self, count: int) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, count)

    def done(self, result: Pulled) -> None:
        """Prints the final line."""
        if self._silent:
            return
        seconds = time.monotonic() - self._started
        files = f"{result.files} file{'' if result.files == 1 else 's'}"
        line = f"pulled {self._title}: {files}, {size_text(result.size)}, {size_text(result.travelled)} transferred"
        stream = report_stream()
        stream.write(f"{line}, in {seconds:.1f} s{_left_out_text(result.left_out)}\n")
        stream.flush()


def _left_out_text(names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    kinds = "special files, links out of the directory and files removed meanwhile"
    return f"; left out, as {kinds} are: {', '.join(names[:5])}{more}"
