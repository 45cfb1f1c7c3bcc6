"""The Python stacks of the processes of a job, with equal ones of many ranks shown once."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from meshgate.errors import ranks_text
from meshgate.ranks import OWN_MESHES, answers, problem_lines, spawn_alone
from meshgate.ranks.stacks_on_host import StackReader
from meshgate.session.errors.failures import SNAPSHOT_ROOT

if TYPE_CHECKING:
    from meshgate.proxies import HostMeshProxy

ANSWER_TIMEOUT = 2.0  # seconds that a process has to answer, twice
# Files of the frames around those of endpoints, which say nothing.
_AROUND = ("/monarch/", "/asyncio/", "/meshgate_", "<_meshgate_sync_", "<meshgate_", "<frozen ")
_SNAPSHOT = re.compile(rf"^{SNAPSHOT_ROOT}")  # a directory that has another name on each host
_LIBRARY = re.compile(r"/lib/python3\.\d+/(?!(?:site|dist)-packages/)")
_INSTALLED = re.compile(r"/(?:site|dist)-packages/")
_SCRIPT_ACTORS = "<meshgate_jobs_spmd_rank_actors_"  # the file of the actors that run training scripts
_NO_SCRIPT = "runs a script whose stack cannot be read: it is not Python, or Python without PYTHONPATH or `site`"


class Frame(NamedTuple):
    file: str
    line: int
    function: str
    text: str = ""

    def __str__(self) -> str:
        where = f'  File "{self.file}", line {self.line}, in {self.function}'
        return f"{where}\n    {self.text}" if self.text else where


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread, or with ``task`` a suspended asyncio task. The outermost frame is first."""

    name: str
    frames: tuple[Frame, ...]
    task: bool = False

    @property
    def user_frames(self) -> tuple[Frame, ...]:
        """The frames from the first that is neither Monarch's nor the standard library's, without Monarch's last."""
        frames = list(self.frames)
        while frames and _is_around(frames[-1]):
            frames.pop()
        while frames and (_is_around(frames[0]) or _LIBRARY.search(frames[0].file)):
            frames.pop(0)
        return tuple(frames)

    def __str__(self) -> str:
        kind = "task" if self.task else "thread"
        return "\n".join([f"{kind} {self.name}", *map(str, self.frames)])

    @property
    def place(self) -> str:
        """``all_reduce (train.py:24)``: what the user's code called, and where. "" if it runs none."""
        frames = self.user_frames
        own = [index for index, each in enumerate(frames) if not _is_foreign(each)]
        if not own:
            return ""
        frame = frames[own[-1]]
        # Decorators and private functions of a library stand between its public function and the user.
        called = (each.function.rpartition(".")[2] for each in frames[own[-1] + 1 :])
        named = next((name for name in called if not name.startswith("_") and name != "wrapper"), frame.function)
        return f"{named} ({frame.file.rpartition('/')[2]}:{frame.line})"


def _is_foreign(frame: Frame) -> bool:
    return any(pattern.search(frame.file) for pattern in (_LIBRARY, _INSTALLED)) or frame.file.startswith("<")


def _is_around(frame: Frame) -> bool:
    return any(part in frame.file for part in _AROUND)


@dataclass(frozen=True, slots=True)
class ProcessStacks:
    """One process: ``mesh`` is the name of its proc mesh, ``session`` the id of the session that spawned it.
    ``problem``: why its stacks are not known."""

    host: str
    mesh: str
    rank: int
    pid: int
    threads: tuple[Thread, ...] = ()
    problem: str = ""
    note: str = ""
    session: str = ""
    script: bool = False
    """Whether it is the interpreter of a training script."""

    @property
    def busy(self) -> tuple[Thread, ...]:
        """The threads and tasks that run code other than Monarch's and the standard library's."""
        return tuple(thread for thread in self.threads if thread.user_frames)

    def text(self, *, all_threads: bool = False) -> str:
        """What it runs, for people."""
        if self.problem:
            return f"  {self.problem}"
        if all_threads:
            texts = [str(thread) for thread in self.threads]
        else:
            texts = ["\n".join(map(str, thread.user_frames)) for thread in self.busy]
        texts += [f"  ({self.note})"] if self.note else []
        if not texts and self.script:
            texts = ["\n".join(map(str, thread.frames)) for thread in self.threads[-1:]]
        if not texts and any(frame.file.startswith(_SCRIPT_ACTORS) for each in self.threads for frame in each.frames):
            return f"  {_NO_SCRIPT}"
        return "\n".join(texts) or "  idle: waits for calls"

    @property
    def place(self) -> str:
        """Where a training script is, for a line that names many ranks; ``faulthandler`` lists its main thread last."""
        if self.problem:
            return f"an unknown place: {self.problem}"
        return next(filter(None, (thread.place for thread in self.threads[::-1])), "code that is not the script's")


@dataclass(frozen=True, slots=True)
class Stacks:
    """The stacks of many processes. ``str`` shows equal ones once, with the ranks that have them."""

    processes: tuple[ProcessStacks, ...]
    problems: dict[str, str] = field(default_factory=dict)
    """Why the processes of a host could not be asked: by its mesh and rank, as in ``workers-1``."""

    def __iter__(self) -> Iterator[ProcessStacks]:
        return iter(self.processes)

    def __len__(self) -> int:
        return len(self.processes)

    def groups(self, *, all_threads: bool = False) -> dict[str, list[ProcessStacks]]:
        """The processes by what they run; the largest group first. A line's file, number and function count."""
        groups: dict[str, list[ProcessStacks]] = {}
        for process in self.processes:
            groups.setdefault(process.text(all_threads=all_threads), []).append(process)
        return dict(sorted(groups.items(), key=lambda group: -len(group[1])))

    def texts(self, *, all_threads: bool = False) -> list[str]:
        """One text for each group, and for each problem."""
        groups = self.groups(all_threads=all_threads)
        parts = [f"{_names(group)}:\n{text}" for text, group in groups.items()]
        return parts + problem_lines(self.problems)

    def __str__(self) -> str:
        return "\n\n".join(self.texts()) or "no processes"

    def __repr__(self) -> str:
        return str(self)


def read_stacks(meshes: dict[str, HostMeshProxy], ranks: Sequence[int] | int | None = None) -> Stacks:
    """The stacks of the processes on the hosts of ``meshes``; ``ranks``: only of processes with these ranks.

    Each host has a process of its own for this, so that a lost host does not concern the others. Raises ValueError if
    no process has one of the ranks, unless a host could not be asked.
    """
    wanted = None if ranks is None else {ranks} if isinstance(ranks, int) else set(ranks)
    found: list[ProcessStacks] = []
    problems: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        asked = {}
        for name, hosts in meshes.items():
            for rank in range(len(hosts)):
                procs = spawn_alone(hosts, rank, "meshgate_stacks")
                stack.callback(procs.stop)
                reader: Any = procs.spawn("meshgate_stacks", StackReader)
                asked[f"{name}-{rank}"] = reader.read.call_one(ANSWER_TIMEOUT)
        for _, read in answers(asked, problems):
            found += map(_process, read)
    # A script stands for the actor that has started it.
    scripts = {(each.session, each.mesh, each.rank) for each in found if each.script}
    shown = [
        each
        for each in found
        if each.mesh not in OWN_MESHES and (each.script or (each.session, each.mesh, each.rank) not in scripts)
    ]
    if wanted is not None and not problems and (unknown := sorted(wanted - {each.rank for each in shown})):
        raise ValueError(f"no process of this job has {ranks_text(unknown)}: {_known(shown)}")
    chosen = [each for each in shown if wanted is None or each.rank in wanted]
    return Stacks(tuple(sorted(chosen, key=lambda each: (each.mesh, each.rank, each.pid))), problems)


def _known(processes: Iterable[ProcessStacks]) -> str:
    """``procs has ranks 0-3, spmd has rank 0``"""
    by_mesh: dict[str, list[int]] = {}
    for process in processes:
        by_mesh.setdefault(process.mesh, []).append(process.rank)
    return ", ".join(f"{mesh} has {ranks_text(ranks)}" for mesh, ranks in by_mesh.items()) or "it has none"


def _process(answer: dict[str, Any]) -> ProcessStacks:
    threads = [
        Thread(each["name"], tuple(_frame(*frame) for frame in each["frames"]), task=kind == "tasks")
        for kind in ("threads", "tasks")
        for each in answer.get(kind, ())
    ]
    return ProcessStacks(
        host=answer["host"],
        mesh=answer["mesh"],
        rank=answer["rank"],
        pid=answer["pid"],
        threads=tuple(threads),
        problem=answer.get("problem", ""),
        note=answer.get("note", ""),
        session=answer["session"],
        script=answer.get("script", False),
    )


def _frame(file: str, *facts: Any) -> Frame:
    """A file of synced code is named relative to its root, as in errors, so that the stacks of all hosts are alike."""
    return Frame(_SNAPSHOT.sub("", file), *facts)


def places_text(scripts: Iterable[ProcessStacks], total: int) -> str:
    """``3 of 4 ranks are in all_reduce (train.py:24), rank 1 is in load (train.py:12)``; "" without scripts."""
    groups: dict[str, list[int]] = {}
    for process in scripts:
        groups.setdefault(process.place, []).append(process.rank)
    texts: list[str] = []
    for place, ranks in sorted(groups.items(), key=lambda group: -len(group[1])):
        if not texts and len(ranks) > 1:
            who = f"all {total} ranks" if len(ranks) == total else f"{len(ranks)} of {total} ranks"
        else:
            who = ranks_text(ranks)
        texts.append(f"{who} {'is' if len(ranks) == 1 else 'are'} in {place}")
    return ", ".join(texts)


def _names(group: Sequence[ProcessStacks]) -> str:
    """``procs ranks 0-2, 5 (4 processes)``."""
    by_mesh: dict[str, list[int]] = {}
    for process in group:
        by_mesh.setdefault(process.mesh, []).append(process.rank)
    named = ", ".join(f"{mesh} {ranks_text(ranks)}" for mesh, ranks in by_mesh.items())
    return f"{named} on {group[0].host}" if len(group) == 1 else f"{named} ({len(group)} processes)"
