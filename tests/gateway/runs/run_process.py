"""A runner of its own for tests, with the version that it runs in a store of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from meshgate_gateway.runs.records import SECRET, RunDirectory, RunRecord, Submitted, read_output
from meshgate_sync.store.store import Store
from meshgate_sync.tree.delta import full_delta
from meshgate_sync.tree.tree import NOTHING, Directory, File, Node, Piece, piece_digest
from meshgate_wire.status import JoinableJob, Submission
from tests.waiting import wait_for

DEADLINE = 60.0


def record_version(home: Path, project: Mapping[str, str]) -> str:
    """Puts a version with these files in the store ``home``; returns its digest."""
    contents = {path: text.encode() for path, text in project.items()}
    tree = _tree({tuple(path.split("/")): data for path, data in contents.items()})
    store = Store(str(home), snapshots=False)
    try:
        fetch = store.prepare(full_delta(tree))
        pieces = {piece_digest(data): data for data in contents.values()}
        for digest in list(fetch.missing):
            store.add(digest, pieces[digest])
        store.finish(tree.digest, base=NOTHING)
    finally:
        store.close()
    return tree.digest.hex()


def _tree(files: Mapping[tuple[str, ...], bytes]) -> Directory:
    entries: dict[bytes, Node] = {}
    for name in {path[0] for path in files}:
        below = {path[1:]: data for path, data in files.items() if path[0] == name}
        data = below.get(())
        entries[name.encode()] = (
            _tree(below) if data is None else File((Piece(piece_digest(data), len(data)),) if data else ())
        )
    return Directory(entries)


class RunProcess:
    """A run with its runner; a context manager that ends both. Unless ``sessions_end`` is false, the sessions of its
    program count as ended before each restart."""

    def __init__(
        self,
        place: Path,
        command: list[str],
        project: Mapping[str, str],
        *,
        sessions_end: bool = True,
        **options: Any,
    ) -> None:
        home = place / "home"
        home.mkdir()
        submission = Submission(
            name="night",
            command=tuple(command),
            version=options.pop("version", None) or record_version(home, project),
            job=JoinableJob(kind="ProcessJob"),
            **options,
        )
        self.directory = RunDirectory(place / "night")
        self.directory.create(
            Submitted(
                submission=submission,
                owner="job",
                time=time.time(),
                variables={"MESHGATE_RUN": "night"},
                set_aside=("MESHGATE_PORT",),
            )
        )
        if sessions_end:
            self.directory.note_sessions_ended(1000)
        lifetime, self._held = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "meshgate_gateway.runs.runner", str(self.directory.path), str(lifetime)],
            env={**os.environ, "MESHGATE_HOME": str(home), "MESHGATE_PORT": "1", SECRET: "of this run"},
            pass_fds=(lifetime,),
        )
        os.close(lifetime)

    @property
    def output(self) -> str:
        return read_output(self.directory.output, 0)[1].decode()

    def wait(self) -> RunRecord:
        """Its record once the runner has ended."""
        self.process.wait(DEADLINE)
        return self.directory.record()

    def wait_printed(self, text: str) -> None:
        """Waits for a whole line, because ``print`` may write the text and the end of the line separately."""

        def printed() -> bool:
            return text in "".join(self.output.rpartition("\n")[:2])

        wait_for(lambda: printed() or self.process.poll() is not None, repr(text))
        assert printed()

    def wait_recorded(self, state: str) -> None:
        wait_for(lambda: self.directory.record().state == state, state)

    def stop(self, grace: float) -> None:
        self.directory.request_stop(grace)

    def close_lifetime(self) -> None:
        """As the end of the gateway does."""
        os.close(self._held)
        self._held = -1

    def __enter__(self) -> RunProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._held >= 0:
            self.close_lifetime()
        self.process.wait(DEADLINE)
