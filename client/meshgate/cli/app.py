"""The ``meshgate`` command: its subcommands, and where they are.

A subcommand's module is imported when it is used, because most need the client, whose import takes long.
``meshgate --help`` and completion have its summary from here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from meshgate import __version__
from meshgate.cli.console import CommandGroup
from meshgate.suggestions import did_you_mean


@dataclass(frozen=True, slots=True)
class _Place:
    """The function of a command: ``module:function`` below ``meshgate.cli``, and the first line of its docstring."""

    function: str
    summary: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def load(self, name: str) -> TyperCommand:
        module, _, function = self.function.partition(":")
        command = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
        found = getattr(importlib.import_module(f"meshgate.cli.{module}"), function)
        command.command(name, context_settings=dict(self.settings))(found)
        loaded = typer.main.get_command(command)
        assert isinstance(loaded, TyperCommand)
        return loaded


_PASS_ON = {"ignore_unknown_options": True}  # to the command that it runs
_OWN_FIRST = {"allow_interspersed_args": False}  # what follows the program is for the program, as python has it
COMMANDS = {
    "ls": _Place("jobs:list_jobs", "List running jobs."),
    "kill": _Place("jobs:kill_jobs", "End jobs and all their processes or pods."),
    "scale": _Place("jobs:scale_mesh", "Change the number of hosts of a mesh of a running job."),
    "status": _Place("status:report_status", "Show hosts, code versions, sessions and calls in flight."),
    "sessions": _Place("status:list_sessions", "List the sessions of a job."),
    "describe": _Place("status:describe_job", "Show everything about a job, in a cluster also its events."),
    "logs": _Place("logs:show_logs", "Print what the actors of all sessions printed."),
    "submit": _Place("runs:submit_program", "Run a program beside the job's gateway, and return at once.", _PASS_ON),
    "runs": _Place("runs:list_runs", "List the programs that were submitted to a job."),
    "stop": _Place("runs:stop_run", "End a submitted program, and give it time to save."),
    "sync": _Place("ranks:sync_code", "Push the code of this directory to the job's hosts."),
    "pull": _Place("ranks:pull_files", "Copy a file or directory from the hosts."),
    "exec": _Place("ranks:run_command", "Run a command on the hosts, and exit with its exit code.", _PASS_ON),
    "shell": _Place("ranks:open_shell", "Open a terminal on a host, and exit with its shell's exit code."),
    "debug": _Place("ranks:debug_actors", "Debug actors at breakpoint(), or let an editor attach."),
    "forward": _Place("ranks:forward_port", "Make a port of a host available here, until interrupted."),
    "stacks": _Place("ranks:show_stacks", "Show the Python stacks of all processes, equal stacks only once."),
    "why": _Place("ranks:explain", "Show calls in flight, and what they wait for."),
    "top": _Place("top:show_top", "Show calls per second, latency, CPU, memory and GPUs, live."),
    "ui": _Place("ui:open_page", "Show a job in the browser, live, until interrupted."),
    "doctor": _Place("doctor:diagnose", "Check the way to a job's gateway, and say what to change."),
    "call": _Place("agents.call:call_endpoint", "Call an endpoint on every rank, after edits and a reload."),
    "run": _Place("agents.run:run_command", "Run a Python program here, and exit with its exit code.", _OWN_FIRST),
    "mcp": _Place("agents.mcp:serve_tools", "Serve tools for coding agents (Model Context Protocol)."),
    "gc": _Place("jobs:collect_garbage", "End processes on this machine of jobs whose gateway is gone."),
    "schema": _Place("schemas:show_schema", "Print the JSON Schema of what a command prints with --json."),
    "version": _Place("app:show_version", "Print the version."),
}


class _Subcommand(TyperCommand):
    """A command of which only the name and the summary are known until it is used."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        assert self.name is not None
        return COMMANDS[self.name].load(self.name).make_context(info_name, args, parent, **extra)


class _Subcommands(CommandGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # Typer suggests those of self.commands, which has none.
        if args[0] not in COMMANDS and not ctx.resilient_parsing:  # as in completion
            ctx.fail(f"No such command {args[0]!r}{did_you_mean(args[0], COMMANDS) or '.'}")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | None:
        if cmd_name not in COMMANDS:
            return None
        return _Subcommand(cmd_name, help=COMMANDS[cmd_name].summary, rich_markup_mode=None)


app = typer.Typer(
    cls=_Subcommands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="""Show and end meshgate jobs, on this machine or in a cluster.

    JOB is the beginning of a job's id, a job file, or with -n the name of a job in that namespace. Without it, commands
    other than submit, exec and scale use the job saved in this directory, or the only one on this machine.

    Exit codes: 0 success, 1 failure, 2 invalid arguments, 3 no such job, 130 interrupted.""",
)


def show_version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _print_version(wanted: bool) -> None:
    if wanted:
        show_version()
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
