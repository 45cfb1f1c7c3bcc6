"""``meshgate sessions``: the sessions of a job, as their gateway describes them."""

from __future__ import annotations

from rich.console import Console

from meshgate.cli.console import age_text, emit, new_table
from meshgate.cli.models import Result
from meshgate.cli.options import AsJson, Job, Namespace
from meshgate.jobs.find import find_job
from meshgate.jobs.sessions import SessionInfo

NAMES_SHOWN = 4
VERSION_SHOWN = 12


class Sessions(Result):
    """``meshgate sessions``"""

    sessions: list[SessionInfo]


def list_sessions(job: Job = None, namespace: Namespace = None, as_json: AsJson = False) -> None:
    """List the sessions of a job.

    Each with its age, meshes, calls and code version, and the process that holds it.
    """
    found = Sessions(sessions=find_job(job, namespace).sessions(None))
    emit(found, as_json, lambda console: show_sessions(found, console))


def show_sessions(found: Sessions, console: Console) -> None:
    table = new_table("NAME", "ID", "STATE", "AGE", "MESHES", "IN FLIGHT", "FINISHED", "UNREAD LINES", "CODE", "HOLDER")
    for info in found.sessions:
        table.add_row(
            info.name or "-",
            info.id[:8],
            info.error or _state(info),
            age_text(info.age),
            _shortened((*info.actors, *info.procs)) or "-",
            str(info.calls_in_flight),
            str(info.calls_finished),
            str(info.unread_lines),
            (info.code_version or "-")[:VERSION_SHOWN],
            info.holder or "-",
        )
    console.print(table if found.sessions else "the job has no sessions")


def _state(info: SessionInfo) -> str:
    held = "held" if info.connected else "left"
    return f"{held}, detached" if info.detached else held


def _shortened(names: tuple[str, ...]) -> str:
    shown = ",".join(names[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown},… ({len(names)})"
