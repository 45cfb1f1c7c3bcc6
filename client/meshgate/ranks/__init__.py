"""A way into each host of a job: commands, terminals, forwarded ports and stacks, through the session's websocket.

What runs on a host is an actor in a process of its own there, so it survives cuts of the connection as every call does,
and ends with the session. Nothing here listens on anything but loopback.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from meshgate.errors import MeshgateError, StepFailedError

if TYPE_CHECKING:
    from meshgate.proxies import HostMeshProxy, ProcMeshProxy
    from meshgate.session.futures import FutureProxy

_USES = "admin debug devices doctor exec forward gather image mount pull shell stacks top"
OWN_MESHES = frozenset(f"meshgate_{use}" for use in _USES.split())
"""Names of the proc meshes that meshgate itself spawns, and of their actors. Views leave them out, so each has a name
that no program uses for a mesh of its own."""

HOSTS_TIMEOUT = 60.0  # seconds that hosts have to start a process and answer; to replace one takes minutes


def spawn_alone(hosts: HostMeshProxy, rank: int, name: str) -> ProcMeshProxy:
    """A process on host ``rank`` in a mesh of its own, so that a lost host does not concern the others."""
    return hosts.slice(hosts=slice(rank, rank + 1)).spawn_procs(name=name)


def answers(asked: Mapping[str, FutureProxy[Any]], problems: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """What hosts answer, by host. Those that fail, or take longer than ``HOSTS_TIMEOUT``, are added to ``problems``."""
    deadline = time.monotonic() + HOSTS_TIMEOUT
    for host, future in asked.items():
        try:
            answer = future.get(timeout=max(0.0, deadline - time.monotonic()))
        except (MeshgateError, TimeoutError) as error:
            problems[host] = why_unread(error)
        else:
            yield host, answer


def why_unread(error: Exception) -> str:
    """Why a host could not be asked: without the line of a StepFailedError that names the step, which is meshgate's."""
    if isinstance(error, TimeoutError):
        return "did not answer in time"
    text = str(error)
    return text.partition("\n")[2] or text if isinstance(error, StepFailedError) else text


def problem_lines(problems: Mapping[str, str]) -> list[str]:
    """One text for each of ``problems``, which are by host; it names all hosts that have it."""
    hosts: dict[str, list[str]] = {}
    for host, problem in problems.items():
        hosts.setdefault(problem, []).append(host)
    return [f"{', '.join(names)}: {problem}" for problem, names in hosts.items()]
