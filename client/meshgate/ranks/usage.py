"""Looks at what the processes of a job use, again and again, through one process on each host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from meshgate.errors import MeshgateError
from meshgate.ranks import OWN_MESHES, answers, spawn_alone, why_unread
from meshgate.ranks.usage_on_host import UsageReader

if TYPE_CHECKING:
    from meshgate.proxies import HostMeshProxy


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of a host. None: it does not report that."""

    host: str
    index: int
    utilization: int | None
    memory: int | None
    memory_total: int | None


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """What a process and its children use. ``mesh`` is the name of its proc mesh, ``gpus`` has indexes on its host."""

    mesh: str
    rank: int
    host: str
    pid: int
    cpu: float | None
    memory: int
    gpus: tuple[int, ...]
    gpu_memory: int | None


@dataclass(slots=True)
class Usage:
    """One look at all hosts. ``problems``: why a host could not be read, by its name."""

    processes: list[ProcessUsage] = field(default_factory=list)
    gpus: list[Gpu] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)


class UsageMeter:
    """Each host has a process of its own, so that a lost host does not concern the others. Close it after use."""

    def __init__(self, meshes: Mapping[str, HostMeshProxy]) -> None:
        self._hosts = {f"{name}-{rank}": (hosts, rank) for name, hosts in meshes.items() for rank in range(len(hosts))}
        self._readers: dict[str, tuple[Any, Any]] = {}  # proc mesh and actor by host

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for procs, _ in self._readers.values():
            procs.stop()

    def read(self) -> Usage:
        """What is used now. A host that failed is tried again at the next look."""
        found, asked = Usage(), {}
        failed: dict[str, str] = {}
        for name in self._hosts:
            try:
                asked[name] = self._reader(name).read.call_one()
            except MeshgateError as error:
                failed[name] = why_unread(error)
        for name, answer in answers(asked, failed):
            _add(found, name, answer)
        for name in failed:
            self._readers.pop(name, None)  # what it was ends with the session, if it has not ended
        found.problems.update(failed)
        found.processes.sort(key=lambda each: (each.mesh, each.rank, each.pid))
        return found

    def _reader(self, name: str) -> Any:
        if name not in self._readers:
            procs = spawn_alone(*self._hosts[name], "meshgate_top")
            self._readers[name] = (procs, procs.spawn("meshgate_top", UsageReader))
        return self._readers[name][1]


def _add(found: Usage, name: str, answer: dict[str, Any]) -> None:
    """Adds a host's answer. Its only process is the one that uses its GPUs, if nothing else is known."""
    processes = [each for each in answer["processes"] if each["mesh"] not in OWN_MESHES]
    for each in processes:
        indexes = each["gpus"]
        if not indexes and len(processes) == 1:
            indexes = [gpu["index"] for gpu in answer["gpus"]]
        found.processes.append(ProcessUsage(**{**each, "gpus": tuple(indexes)}))
    names = ("index", "utilization", "memory", "memory_total")
    found.gpus += [Gpu(answer["host"], **{name: gpu[name] for name in names}) for gpu in answer["gpus"]]
    if answer["problem"]:
        found.problems[name] = answer["problem"]
