"""The files of one host, listed and read through an actor there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from meshgate.errors import PullFailed, StepFailedError, SupervisionError
from meshgate.session.futures import FutureProxy

CHANGED_SINCE = frozenset({"absent", "changed"})
"""The kinds of failures of a file that was replaced, shortened or removed since it was listed."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of a listing. ``name`` is relative to the pulled directory; it is empty for a file pulled by itself."""

    name: str
    kind: str
    size: int
    mtime: int
    mode: int
    target: str


class Source(Protocol):
    """The files of one host."""

    host: str

    def listing(self) -> list[Entry]: ...

    def read(self, entry: Entry, offset: int, length: int) -> FutureProxy[Any]: ...


class HostFiles:
    """The files below ``remote``, read by a ``FileReader`` on the host. With ``growing``, files may grow while they are
    read, and are read up to the size that they had."""

    def __init__(self, reader: Any, remote: str, *, growing: bool = False) -> None:
        self._reader = reader
        self._remote = remote
        self._growing = growing
        self.host = ""

    def listing(self) -> list[Entry]:
        self.host, rows = result_of(self._reader.listing.call_one(self._remote), self.host, self._remote)
        if isinstance(rows, tuple):
            raise read_error(rows, self.host, self._remote)
        return [Entry(*row) for row in rows]

    def read(self, entry: Entry, offset: int, length: int) -> FutureProxy[Any]:
        size = -1 if self._growing else entry.size
        future: FutureProxy[Any] = self._reader.read.call_one(
            self._remote, entry.name, offset, length, size, entry.mtime
        )
        return future


def result_of(future: FutureProxy[Any], host: str, path: str) -> Any:
    """The host's result. Raises PullFailed if the host is lost."""
    try:
        return future.get()
    except (StepFailedError, SupervisionError) as error:
        raise PullFailed(f"cannot read {path}: {error}", host=host, path=path) from error


def read_error(failure: tuple[str, str], host: str, path: str) -> PullFailed:
    """The error for a host's (kind, text)."""
    kind, text = failure
    messages = {
        "absent": f"{path} does not exist on {host}",
        "forbidden": f"the worker process on {host} may not read {path} ({text})",
        "changed": f"{path} changed on {host} while it was being read; pull it again once it is complete",
    }
    message = messages.get(kind, f"cannot read {path} on {host}: {text}")
    return PullFailed(message, host=host, path=path, absent=kind == "absent")
