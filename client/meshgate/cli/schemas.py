"""``meshgate schema``: what each command prints with ``--json``."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from pydantic import BaseModel

from meshgate.cli.console import fail
from meshgate.cli.doctor import Diagnosis
from meshgate.cli.logs import LogLine
from meshgate.cli.models import (
    Called,
    CommandOutcomes,
    Ended,
    Jobs,
    Leftovers,
    Pull,
    Ran,
    Scaled,
    StackGroups,
    Sync,
    Top,
)
from meshgate.cli.ranks import Why
from meshgate.cli.status import Description, Sessions
from meshgate_wire.status import JobStatus, Runs, RunStatus

SCHEMAS: dict[str, type[BaseModel]] = {
    "ls": Jobs,
    "kill": Ended,
    "scale": Scaled,
    "sessions": Sessions,
    "status": JobStatus,
    "describe": Description,
    "logs": LogLine,
    "submit": RunStatus,
    "runs": Runs,
    "stop": RunStatus,
    "sync": Sync,
    "pull": Pull,
    "exec": CommandOutcomes,
    "stacks": StackGroups,
    "why": Why,
    "top": Top,
    "gc": Leftovers,
    "doctor": Diagnosis,
    "call": Called,
    "run": Ran,
}
"""The model that each command prints with ``--json``."""


def show_schema(
    command: Annotated[str, typer.Argument(metavar="COMMAND", help="The command whose --json output is described.")],
) -> None:
    """Print the JSON Schema of what a command prints with --json."""
    model = SCHEMAS.get(command)
    if model is None:
        fail(f"{command!r} prints no JSON; commands that do: {', '.join(SCHEMAS)}", 2)
    typer.echo(json.dumps(model.model_json_schema(), indent=2))
