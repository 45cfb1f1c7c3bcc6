"""The result of one sync, and the line that a terminal shows for it."""

from __future__ import annotations

from dataclasses import dataclass


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
        return f"synced {files}, {_size_text(self.nbytes)} → {self.ready}/{self.hosts} hosts in {duration}"


def _size_text(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError
