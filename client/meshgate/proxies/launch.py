"""How the processes of a spawn are started: their command, and the CPUs they are bound to."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshgate.shapes.shape import Extent, Point
from meshgate_wire import messages
from meshgate_wire.messages import Launch


@dataclass
class BootstrapCommand:
    """The command that starts a process. Monarch's own class is accepted in its place.

    ``program``: a path on the host; this program's ``sys.executable`` stands for the Python of the host. ``args``: None
    for those that start a process of Monarch's. ``env`` is set on top of the host's environment, or is all there is
    without ``inherit_env``; a value of None removes a variable.
    """

    program: str
    arg0: str | None = None
    args: list[str] | None = None
    env: Mapping[str, str | None] = field(default_factory=dict)
    inherit_env: bool = True

    def __post_init__(self) -> None:
        """Raises TypeError for variables that are not strings, as Monarch's class does."""
        for name, value in self.env.items():
            if not isinstance(name, str) or not isinstance(value, str | None):
                raise TypeError(f"BootstrapCommand(env=...): {name!r}: {value!r} is not a string or None")

    def with_env(self, env: Mapping[str, str | None]) -> BootstrapCommand:
        """A copy with ``env`` in addition."""
        return replace(self, env={**self.env, **env})


def default_bootstrap_cmd() -> BootstrapCommand:
    """The command that starts a process if no other is given: the Python of the host."""
    return BootstrapCommand(sys.executable)


def launch_of(
    extent: Extent,
    per_host: Mapping[str, int],
    proc_bind: Sequence[Mapping[str, str]] | None,
    command: BootstrapCommand | Callable[[Point], Any] | None,
) -> Launch | None:
    """The message for the arguments of ``spawn_procs``. ``extent`` is that of all processes.

    Calls ``command``, if it is a function, with the point of each process. Raises ``ValueError`` or ``TypeError``.
    """
    if proc_bind is None and command is None:
        return None
    count = math.prod(per_host.values())
    if proc_bind is not None and len(proc_bind) != count:
        raise ValueError(f"proc_bind length ({len(proc_bind)}) must equal procs_per_host ({count})")
    binding = tuple(dict(each) for each in proc_bind or ())
    if command is None:
        return Launch(binding=binding)
    if not callable(command):
        return Launch(binding=binding, commands=(_to_wire(command),))
    commands: list[messages.BootstrapCommand] = []
    command_of = []
    for rank in range(extent.nelements):
        wanted = _to_wire(command(Point(rank, extent)))
        if wanted not in commands:
            commands.append(wanted)
        command_of.append(commands.index(wanted))
    return Launch(binding=binding, commands=tuple(commands), command_of=tuple(command_of))


def _to_wire(command: Any) -> messages.BootstrapCommand:
    try:
        program, args = command.program, command.args
        return messages.BootstrapCommand(
            program=None if program == sys.executable else program,
            arg0=command.arg0,
            args=None if args is None else tuple(args),
            env=dict(command.env),
            inherit_env=command.inherit_env,
        )
    except AttributeError as error:
        raise TypeError(f"bootstrap_command must be a BootstrapCommand, not {command!r}") from error
