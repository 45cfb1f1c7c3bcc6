"""debugpy in a process of a job, for an editor on the laptop."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshgate.errors import JobError
from meshgate.ranks.forward import ForwardedPort, forward
from meshgate.ranks.stacks_on_host import StackReader

if TYPE_CHECKING:
    from types import TracebackType

    from meshgate.proxies import HostMeshProxy

START_TIMEOUT = 60.0  # seconds; debugpy starts a process of its own


@dataclass(frozen=True, slots=True)
class EditorDebugging:
    """An editor may attach to ``port`` of 127.0.0.1 until this is closed. ``configuration`` is for VS Code."""

    port: int
    roots: tuple[str, ...]
    forwarded: ForwardedPort

    @property
    def configuration(self) -> dict[str, Any]:
        """An entry for ``launch.json``: synced code maps to the files of the workspace."""
        return {
            "name": "meshgate",
            "type": "debugpy",
            "request": "attach",
            "connect": {"host": "127.0.0.1", "port": self.port},
            "pathMappings": [{"localRoot": "${workspaceFolder}", "remoteRoot": root} for root in self.roots],
            "justMyCode": True,
        }

    def close(self) -> None:
        """Ends the connection. The process runs on; debugpy stays in it."""
        self.forwarded.close()

    def __enter__(self) -> EditorDebugging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __str__(self) -> str:
        return json.dumps(self.configuration, indent=2)


def debug_in_editor(hosts: HostMeshProxy, procs: str, rank: int) -> EditorDebugging:
    """Starts debugpy in process ``rank`` of the proc mesh named ``procs``. Raises JobError that says why it cannot."""
    with contextlib.ExitStack() as stack:
        spawned = hosts.spawn_procs(name="stacks")
        stack.callback(spawned.stop)
        readers: Any = spawned.spawn("stacks", StackReader)
        answers = list(readers.start_debugpy.call(procs, rank, START_TIMEOUT).get().values())
    found = next(((host, answer) for host, answer in enumerate(answers) if answer), None)
    if found is None:
        raise JobError(f"no process has rank {rank} in a proc mesh named {procs!r}; job.status() lists the meshes")
    host, answer = found
    if "problem" in answer:
        raise JobError(f"cannot debug rank {rank} of {procs!r}: {answer['problem']}")
    forwarded = forward(hosts, answer["port"], host, local_port=None, reverse=False)
    return EditorDebugging(forwarded.port, tuple(answer["roots"]), forwarded)
