"""Copies files and directories, such as checkpoints and profiles, from workers to this machine.

A file appears under its name only when it is complete. An interrupted pull resumes where it stopped
(``partial_file``), and files that are already here with their size and time are skipped. Nothing is ever written
outside of the local directory, whatever names a host reports (``destination``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from meshgate.transfer.download import Download
from meshgate.transfer.host_files import HostFiles, Source
from meshgate.transfer.on_host import FileReader
from meshgate.transfer.progress_bar import PullProgress
from meshgate.transfer.pulled import Pulled

if TYPE_CHECKING:
    from meshgate.proxies import HostMeshProxy

CONCURRENT_HOSTS = 8


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
    top = os.fspath(local)
    several = len(chosen) > 1
    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(_host_files(hosts, rank, remote)) for rank in chosen]
        targets = [os.path.join(top, f"rank-{rank}", "") if several else top for rank in chosen]
        with PullProgress(remote) as progress, ThreadPoolExecutor(min(len(chosen), CONCURRENT_HOSTS)) as pool:
            downloads = [
                Download(source, remote, target, progress.advance, progress.expect)
                for source, target in zip(sources, targets, strict=True)
            ]
            try:
                futures = [pool.submit(download.run) for download in downloads]
                result = sum((future.result() for future in futures), Pulled())
            finally:
                for download in downloads:
                    download.stopped = True
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
def _host_files(hosts: HostMeshProxy, rank: int, remote: str) -> Iterator[Source]:
    procs = hosts.slice(hosts=slice(rank, rank + 1)).spawn_procs(name="pull")
    try:
        yield HostFiles(procs.spawn("pull", FileReader), remote)
    finally:
        procs.stop()
