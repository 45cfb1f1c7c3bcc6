"""The directory of a run: what was submitted, how far it has come, and what it printed.

::

    <runs>/<name>/submission    what was submitted, with a digest of the run's secret; for its owner only
    <runs>/<name>/record        how far it is, as its runner notes it
    <runs>/<name>/stop          the seconds that the program has to end; exists once it must end
    <runs>/<name>/sessions      after how many starts the server has ended the sessions that the program held
    <runs>/<name>/output/<n>    what it printed, from byte n on
    <runs>/<name>/project       its copy of the synced project, in which it runs

A directory is complete when it gets its name: until then, and while it is removed, its name begins with a dot. The
runner and the server are separate processes that share nothing else but a line that the runner prints
(``PROGRAM_ENDED``), so each file has one writer, which replaces it atomically.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from meshgate_wire.status import LIVE_STATES, RunState, RunStatus, Submission

SEGMENT = 4 << 20  # bytes of a file of output
OUTPUT_LIMIT = 64 << 20  # bytes of output that are kept; older output is removed a file at a time
MAX_READ = 1 << 20
PROGRAM_ENDED = "the program has ended"  # a line by which a runner requests the end of its sessions before a restart
SECRET = "MESHGATE_RUN_TOKEN"  # the variable in which a program, and before it its runner, has the secret of the run


class Submitted(BaseModel):
    """A submission as the server took it: by whom, when (seconds since 1970), and how the program finds its job again.

    ``identity`` is the one to which sessions of the program belong, and ``owner`` the user behind it. ``secret`` is the
    SHA-256 of the run's secret, in hexadecimal digits.
    ``variables`` are added to the program's environment, and ``set_aside`` removed from it.
    """

    model_config = ConfigDict(frozen=True)

    submission: Submission
    identity: str = "job"
    owner: str
    secret: str = ""
    time: float
    variables: dict[str, str]
    set_aside: tuple[str, ...] = ()


class RunRecord(BaseModel):
    """How far a run is. Times are seconds since 1970."""

    state: RunState = "starting"
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    reason: str = ""
    restarts: int = 0
    pid: int | None = None

    @property
    def live(self) -> bool:
        return self.state in LIVE_STATES


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.project = path / "project"
        self.output = path / "output"

    @property
    def name(self) -> str:
        return self.path.name

    def create(self, submitted: Submitted) -> None:
        """Raises OSError, and leaves what it has written."""
        self.path.mkdir(mode=0o700)
        self.output.mkdir()
        self._replace("submission", submitted.model_dump_json())
        self.write_record(RunRecord())

    def submitted(self) -> Submitted:
        """Raises OSError, and ValueError if it is damaged. So does ``record``."""
        return Submitted.model_validate_json((self.path / "submission").read_bytes())

    def record(self) -> RunRecord:
        return RunRecord.model_validate_json((self.path / "record").read_bytes())

    def write_record(self, record: RunRecord) -> None:
        self._replace("record", record.model_dump_json())

    def request_stop(self, grace: float) -> None:
        self._replace("stop", repr(grace))

    def stop_grace(self) -> float | None:
        """The seconds that the program has to end; None unless it must end."""
        try:
            return float((self.path / "stop").read_text())
        except FileNotFoundError:
            return None

    def note_sessions_ended(self, starts: int) -> None:
        """The sessions that the program held are over, after it has been started so many times."""
        self._replace("sessions", str(starts))

    def sessions_ended(self) -> int:
        """After how many starts they are."""
        try:
            return int((self.path / "sessions").read_text())
        except FileNotFoundError:
            return 0

    def note_reported(self) -> None:
        """A caller has received how the run ended."""
        (self.path / "reported").touch()

    def status(self, *, has_runner: bool) -> RunStatus:
        """A run that has not ended is lost without a runner, and so is one whose files cannot be read."""
        news, now = not (self.path / "reported").exists(), time.time()
        try:
            submitted, record = self.submitted(), self.record()
        except (OSError, ValueError) as error:
            problem = str(error).partition("\n")[0]
            reason = f"its files on the gateway's machine cannot be read: {problem}"
            return RunStatus(name=self.name, state="lost", command=(), age=self._age(now), reason=reason, news=news)
        if record.live and not has_runner:
            reason = "its runner is gone, and nothing notes any more how it ends"
            record = record.model_copy(update={"state": "lost", "reason": reason})
        ended = record.ended or now
        return RunStatus(
            name=self.name,
            state=record.state,
            command=submitted.submission.command,
            age=round(max(0.0, now - submitted.time), 1),
            seconds=0.0 if record.started is None else round(max(0.0, ended - record.started), 1),
            exit_code=record.exit_code,
            reason=record.reason,
            restarts=record.restarts,
            max_restarts=submitted.submission.restarts,
            pid=record.pid if record.live else None,
            printed=printed(self.output),
            owner=submitted.owner,
            version=submitted.submission.version,
            news=news and not record.live,
            id=submitted.submission.id,
        )

    def _age(self, now: float) -> float:
        try:
            return round(max(0.0, now - self.path.stat().st_mtime), 1)
        except OSError:
            return 0.0

    def _replace(self, name: str, text: str) -> None:
        temporary = self.path / f".{name}"
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
        temporary.replace(self.path / name)


class OutputWriter:
    """Appends to the output of a run, and removes the oldest files above ``limit``.

    A program must never wait for a disk that is full: what cannot be written is counted, and said once it can be.
    """

    def __init__(self, directory: Path, *, segment: int = SEGMENT, limit: int = OUTPUT_LIMIT) -> None:
        self._directory, self._segment, self._limit = directory, segment, limit
        self._end = 0
        self._file_start = 0
        self._lost = 0

    def write(self, data: bytes) -> None:
        if self._lost:
            note = b"\n[meshgate: %d bytes of output could not be written]\n" % self._lost
            if self._append(note) < len(note):
                self._lost += len(data)
                return
            self._lost = 0
        self._lost += len(data) - self._append(data)

    def _append(self, data: bytes) -> int:
        """Returns how many bytes were written."""
        written = 0
        while written < len(data):
            if self._end - self._file_start >= self._segment:
                self._file_start = self._end
                self._remove_old()
            room = self._segment - (self._end - self._file_start)
            try:
                with open(self._directory / f"{self._file_start:016d}", "ab", buffering=0) as file:
                    count = file.write(data[written : written + room])
            except OSError:
                return written
            written += count
            self._end += count
        return written

    def _remove_old(self) -> None:
        files = _segments(self._directory)
        for _, path in files[: max(0, len(files) - (self._limit // self._segment - 1))]:
            path.unlink()


def read_output(directory: Path, after: int, limit: int = MAX_READ) -> tuple[int, bytes]:
    """The output from byte ``after`` on, at most ``limit`` bytes of it, and at which byte that begins: later than
    ``after`` if the bytes before it were removed."""
    while True:
        files = _segments(directory)
        if not files:
            return after, b""
        start, path = next((each for each in reversed(files) if each[0] <= after), files[0])
        try:
            with open(path, "rb") as file:
                file.seek(max(0, after - start))
                return max(after, start), file.read(limit)
        except FileNotFoundError:  # removed meanwhile
            continue


def printed(directory: Path) -> int:
    """The bytes of output so far; those that can be counted, if something has damaged the directory."""
    try:
        start, path = _segments(directory)[-1]
        return start + path.stat().st_size
    except (OSError, ValueError, IndexError):
        return 0


def _segments(directory: Path) -> list[tuple[int, Path]]:
    return sorted((int(path.name), path) for path in directory.iterdir())
