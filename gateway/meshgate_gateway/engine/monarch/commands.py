"""The commands that start processes, in Monarch's terms."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from meshgate_wire.messages import BootstrapCommand, Launch

ARGUMENTS = ("-m", "monarch._src.actor.bootstrap_main")

# Only the host knows its Python: that of its process, which starts this shell. $0 is the Python of the engine, for
# systems without /proc, where hosts run on the engine's machine.
HOSTS_PYTHON = (
    'python=$0; [ ! -r /proc/$PPID/cmdline ] || python=$(tr "\\000" "\\n" </proc/$PPID/cmdline | head -n 1); '
    'exec "$python" "$@"'
)


def native_commands(launch: Launch) -> Callable[[Any], Any] | None:
    """For ``HostMesh.spawn_procs``: returns the command of the process at a point. None: the host's default."""
    if not launch.commands:
        return None
    commands = [_native_command(command) for command in launch.commands]
    return lambda point: commands[launch.command_of[point.rank] if launch.command_of else 0]


def _native_command(command: BootstrapCommand) -> Any:
    from monarch._rust_bindings.monarch_hyperactor import host_mesh  # noqa: PLC0415 - loaded by Client

    args = ARGUMENTS if command.args is None else command.args
    if command.program is None:
        program, arg0, args = "/bin/sh", None, ("-c", HOSTS_PYTHON, sys.executable, *args)
    else:
        program, arg0 = command.program, command.arg0
    return host_mesh.BootstrapCommand(program, arg0, list(args), dict(command.env), command.inherit_env)
