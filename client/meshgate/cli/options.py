"""Arguments and options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Job = Annotated[str | None, typer.Argument(metavar="JOB", help="An id, a job file, or with -n a name.")]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="The job is in this namespace of a Kubernetes cluster.")
]
Mesh = Annotated[str | None, typer.Option("--mesh", help="The host mesh; the default is the only one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; `meshgate schema COMMAND` prints its schema.")]
Variables = Annotated[list[str] | None, typer.Option("--env", "-e", help="A variable to set, as NAME=VALUE.")]
Workdir = Annotated[str | None, typer.Option("--workdir", help="The directory to run it in.")]
