"""What a terminal shows while a job comes up, and goes: a picture that changes in place, or plain lines elsewhere.

``MESHGATE_PROGRESS`` chooses: ``auto`` (the default), ``plain``, ``off``. Everything goes to stderr.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text
from typing_extensions import Self

from meshgate_kubernetes.readiness import MeshProgress, Progress
from meshgate_kubernetes.spec import Object
from meshgate_kubernetes.waiting import Stage

__all__ = ["Display", "PlainDisplay", "RichDisplay", "SilentDisplay", "choose_display", "duration", "told_when_up"]


class Display(Protocol):
    """A Listener that is told the end as well. A context manager around the waiting."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def created(self, obj: Object) -> None: ...

    def progress(self, progress: Progress) -> None: ...

    def doing(self, text: str) -> None:
        """What takes its time now, where it is not a job that comes up."""

    def done(self, text: str) -> None:
        """The last line, which stays."""


def choose_display(title: str, stream: TextIO | None = None) -> Display:
    """The display that ``MESHGATE_PROGRESS`` and the terminal call for."""
    stream = stream or sys.stderr
    wanted = os.environ.get("MESHGATE_PROGRESS", "auto").lower()
    if wanted not in ("auto", "plain", "off"):
        raise ValueError(f"MESHGATE_PROGRESS={wanted!r}: expected auto, plain or off")
    if wanted == "off":
        return SilentDisplay()
    if wanted == "plain" or not stream.isatty():
        return PlainDisplay(title, stream)
    return RichDisplay(title, Console(file=stream))


class SilentDisplay:
    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def created(self, obj: Object) -> None:
        return None

    def progress(self, progress: Progress) -> None:
        return None

    def doing(self, text: str) -> None:
        return None

    def done(self, text: str) -> None:
        return None


class PlainDisplay(SilentDisplay):
    """A line for what is new, and none for what is not."""

    def __init__(self, title: str, stream: TextIO) -> None:
        self._title = title
        self._stream = stream
        self._told: set[str] = set()
        self._objects: list[str] = []

    def created(self, obj: Object) -> None:
        self._objects.append(str(obj["kind"]))

    def progress(self, progress: Progress) -> None:
        if self._objects:
            self._say(f"created {len(self._objects)} objects: {', '.join(dict.fromkeys(self._objects))}")
            self._objects = []
        for mesh in progress.meshes:
            self._say(f"{mesh.name}: {_stages(mesh)}")
        for problem in progress.problems:
            self._say(str(problem))
        if progress.trouble:
            self._say(progress.trouble)

    def doing(self, text: str) -> None:
        self._say(text)

    def done(self, text: str) -> None:
        self._say(text)

    def _say(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._stream.write(f"{self._title}: {line}\n")
            self._stream.flush()


class RichDisplay(SilentDisplay):
    """The meshes with the stages of their pods, and what is wrong, redrawn in place; one line remains."""

    def __init__(self, title: str, console: Console) -> None:
        self._title = title
        self._console = console
        self._started = time.monotonic()
        self._objects = 0
        self._latest: Progress | None = None
        self._doing = ""
        self._last = ""
        self._live = Live(console=console, get_renderable=self._picture, refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        if self._last:
            self._console.print(Text.assemble(("✓ ", "green"), f"{self._title} {self._last}"))

    def created(self, obj: Object) -> None:
        self._objects += 1

    def progress(self, progress: Progress) -> None:
        self._latest = progress

    def doing(self, text: str) -> None:
        self._doing = text

    def done(self, text: str) -> None:
        self._last = text

    def _picture(self) -> Group:
        elapsed = time.monotonic() - self._started
        title = " ".join(filter(None, (self._title, self._doing)))
        rows: list[Spinner | Text] = [Spinner("dots", Text(f"{title}  {elapsed:.0f} s", style="bold"))]
        if self._latest is None and self._doing:
            return Group(*rows)
        if self._latest is None:
            rows.append(Text(f"  {self._objects} objects created", style="dim"))
            return Group(*rows)
        rows.extend(_row(mesh) for mesh in self._latest.meshes)
        rows.extend(Text(f"  ! {problem}", style="yellow") for problem in self._latest.problems[:8])
        if self._latest.trouble:
            rows.append(Text(f"  ! {self._latest.trouble}", style="yellow"))
        return Group(*rows)


def _row(mesh: MeshProgress) -> Text:
    counts = dict(mesh.stages)
    ready = counts.get(Stage.READY, 0)
    mark = ("●", "green") if mesh.ready else ("○", "cyan")
    rest = ", ".join(f"{count} {stage.value}" for stage, count in mesh.stages if stage is not Stage.READY)
    return Text.assemble("  ", mark, f" {mesh.name}  {ready}/{mesh.wanted} ready", (f"  {rest}" if rest else "", "dim"))


def _stages(mesh: MeshProgress) -> str:
    return f"{', '.join(f'{count} {stage.value}' for stage, count in mesh.stages)} (of {mesh.wanted})"


def duration(seconds: int) -> str:
    """``90 s``, ``30 min``, ``1 h``, ``1.5 h``."""
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds / 60:g} min" if seconds < 3600 else f"{seconds / 3600:g} h"


def told_when_up(meshes: Mapping[str, int], idle_timeout: int) -> str:
    """The line that remains."""
    pods = ", ".join(f"{name} {count}" for name, count in meshes.items())
    idle = f"ends itself after {duration(idle_timeout)} without a session"
    return f"is up: {pods}; {idle if idle_timeout else 'runs until killed'}"
