"""Terminal output while a job starts or ends: a live display on a terminal, plain lines elsewhere, on stderr."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text
from typing_extensions import Self

from meshgate.progress import Block, new_console, progress_mode
from meshgate_kubernetes.manifests.spec import Object
from meshgate_kubernetes.status.diagnosis import Stage
from meshgate_kubernetes.status.readiness import MeshProgress, Progress

if TYPE_CHECKING:
    from meshgate_kubernetes.jobs.lifecycle import RunningJob

_SHOWN_PROBLEMS = 8
_REPEAT_INTERVAL = 10.0  # seconds


def choose_display(title: str, stream: TextIO | None = None, *, quiet: bool = False) -> SilentDisplay:
    """The display for ``MESHGATE_PROGRESS`` and the terminal; none if ``quiet``."""
    if quiet:
        return SilentDisplay()
    stream = stream or sys.stderr
    match progress_mode(stream):
        case "off":
            return SilentDisplay()
        case "plain":
            return PlainDisplay(title, stream)
        case "live":
            return RichDisplay(title, new_console(file=stream))


class SilentDisplay(Block):
    """A context manager around waiting for a job: a listener for its progress that also shows other steps. This one
    shows nothing."""

    def created(self, obj: Object) -> None:
        return None

    def progress(self, progress: Progress) -> None:
        return None

    def activity(self, text: str) -> None:
        """Shows the current step, if it is not the start of a job."""

    def done(self, text: str) -> None:
        """Shows the final line, which remains."""


class PlainDisplay(SilentDisplay):
    """Prints each line once, and lines of progress that differ in their numbers alone every ten seconds."""

    def __init__(self, title: str, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._title = title
        self._stream = stream
        self._clock = clock
        self._printed: set[str] = set()
        self._next: dict[str, float] = {}  # by a line without its numbers: when another one like it may be printed
        self._created: list[str] = []

    def created(self, obj: Object) -> None:
        self._created.append(str(obj["kind"]))

    def progress(self, progress: Progress) -> None:
        if self._created:
            self._print(f"created {_objects_text(len(self._created))}: {', '.join(dict.fromkeys(self._created))}")
            self._created = []
        for mesh in progress.meshes:
            self._print_sometimes(f"{mesh.name}: {_stages_text(mesh)}")
        for problem in progress.problems:
            self._print_sometimes(str(problem))
        if progress.trouble:
            self._print(progress.trouble)

    def activity(self, text: str) -> None:
        self._print(text)

    def done(self, text: str) -> None:
        self._print(text)

    def _print_sometimes(self, line: str) -> None:
        kind, now = re.sub(r"\d+", "0", line), self._clock()
        if line not in self._printed and now >= self._next.get(kind, now):
            self._next[kind] = now + _REPEAT_INTERVAL
            self._print(line)

    def _print(self, line: str) -> None:
        if line not in self._printed:
            self._printed.add(line)
            self._stream.write(f"{self._title}: {line}\n")
            self._stream.flush()


class RichDisplay(SilentDisplay):
    """Redraws the meshes, the stages of their pods and their problems in place; leaves one line."""

    def __init__(self, title: str, console: Console) -> None:
        self._title = title
        self._console = console
        self._started = time.monotonic()
        self._created = 0
        self._latest: Progress | None = None
        self._activity = ""
        self._final = ""
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        if self._final:
            self._console.print(Text.assemble(("✓ ", "green"), f"{self._title} {self._final}"))

    def created(self, obj: Object) -> None:
        self._created += 1

    def progress(self, progress: Progress) -> None:
        self._latest = progress

    def activity(self, text: str) -> None:
        self._activity = text

    def done(self, text: str) -> None:
        self._final = text

    def _render(self) -> Group:
        elapsed = time.monotonic() - self._started
        title = " ".join(filter(None, (self._title, self._activity)))
        rows: list[Spinner | Text] = [Spinner("dots", Text(f"{title}  {elapsed:.0f} s", style="bold"))]
        if self._latest is None and self._activity:
            return Group(*rows)
        if self._latest is None:
            rows.append(Text(f"  {_objects_text(self._created)} created", style="dim"))
            return Group(*rows)
        rows.extend(_mesh_row(mesh) for mesh in self._latest.meshes)
        rows.extend(Text(f"  ! {problem}", style="yellow") for problem in self._latest.problems[:_SHOWN_PROBLEMS])
        if self._latest.trouble:
            rows.append(Text(f"  ! {self._latest.trouble}", style="yellow"))
        return Group(*rows)


def _mesh_row(mesh: MeshProgress) -> Text:
    counts = dict(mesh.stages)
    ready = counts.get(Stage.READY, 0)
    mark = ("●", "green") if mesh.ready else ("○", "cyan")
    rest = ", ".join(f"{count} {stage.value}" for stage, count in mesh.stages if stage is not Stage.READY)
    return Text.assemble("  ", mark, f" {mesh.name}  {ready}/{mesh.wanted} ready", (f"  {rest}" if rest else "", "dim"))


def _stages_text(mesh: MeshProgress) -> str:
    return f"{', '.join(f'{count} {stage.value}' for stage, count in mesh.stages)} (of {mesh.wanted})"


def _objects_text(count: int) -> str:
    return f"{count} object" if count == 1 else f"{count} objects"


def duration_text(seconds: int) -> str:
    """``90 s``, ``30 min``, ``1 h``, ``1.5 h``."""
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds / 60:g} min" if seconds < 3600 else f"{seconds / 3600:g} h"


def cannot_scale(job: RunningJob, mesh: str, hosts: int, reason: object) -> str:
    """The error of a change of the number of hosts."""
    return f"cannot scale mesh {mesh!r} of job {job.name!r} from {job.meshes[mesh]} to {hosts} hosts: {reason}"


def ready_message(meshes: Mapping[str, int], idle_timeout: int) -> str:
    """The final line of a job that has started."""
    pods = ", ".join(f"{name}={count}" for name, count in meshes.items())
    end = f"ends after {duration_text(idle_timeout)} without a session" if idle_timeout else "runs until killed"
    return f"is ready ({pods}); {end}"
