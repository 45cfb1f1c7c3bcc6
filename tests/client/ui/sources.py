"""Jobs as a gateway reports them, without a gateway."""

from __future__ import annotations

import base64
import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from meshgate.errors import JobNotRunning, MeshgateError
from meshgate.ui.server import Meter, StackRequest
from meshgate_wire.status import (
    CallCounts,
    CallStatus,
    CallTimeline,
    EndedRanks,
    HostStatus,
    JobStatus,
    MeshStatus,
    OutputPage,
    PrintedLine,
    RankReply,
    RunOutput,
    RunStatus,
    SessionOutput,
    SessionStatus,
)

VERSION = "cafe" * 16


def status(hosts: int, gpus: int) -> JobStatus:
    """A job whose rank 3 died, whose ranks 0 and 1 are busy, whose last host is missing, and whose host 1 is
    behind, and about to end."""
    names = [f"workers-{rank}" for rank in range(hosts)]
    known = tuple(
        HostStatus(
            mesh="workers",
            rank=rank,
            name=name,
            state="missing" if rank == hosts - 1 else "ready",
            reason="OOMKilled" if rank == hosts - 1 else "drained" if rank == 1 else "",
            seconds_left=23.7 if rank == 1 else None,
            version="" if rank == 1 else VERSION,
            parent="" if rank == hosts - 1 else "workers-0" if rank else "gateway",
        )
        for rank, name in enumerate(names)
    )
    sizes = {"hosts": hosts, "gpus": gpus}
    procs = MeshStatus(
        kind="procs",
        name="procs",
        number=2,
        sizes=sizes,
        version=VERSION,
        hosts=tuple(names),
        kept=4**11,
        kept_by_rank={2: 4**11},
    )
    actors = MeshStatus(
        kind="actors",
        name="trainers",
        number=3,
        procs=2,
        class_name="t.Trainer",
        sizes=sizes,
        dead={3: "<b>fault</b>"},
        ended=(EndedRanks(ranks=((3, 3),), reason="<b>fault</b>"),),
        endpoints={"step": CallCounts(ended=100, seconds=2.0, in_flight=1)},
    )
    call = CallStatus(
        mesh="trainers",
        endpoint="step",
        age=92.0,
        total=hosts * gpus,
        answered=hosts * gpus - 2,
        waiting={0: "workers-0", 1: "workers-0"},
        procs="procs",
        processes={0: 0, 1: 1},
    )
    session = SessionStatus(
        session="0123456789abcdef" * 2,
        owner="alice",
        connected=True,
        pid=7,
        version=VERSION,
        hosts=known,
        meshes=(procs, actors),
        calls=(call,),
        calls_in_flight=1,
    )
    return JobStatus(gateway_version="1.2", python="3.11", meshes={"workers": hosts}, hosts=known, sessions=(session,))


def printed(number: int, text: str, rank: int = 0, *, end: str = "\n", stream: str = "stdout") -> PrintedLine:
    return PrintedLine.model_validate(
        {
            "number": number,
            "stream": stream,
            "mesh": "trainers",
            "ranks": (rank,),
            "count": 1,
            "host": "workers-0",
            "text": text,
            "end": end,
        }
    )


def timeline(call: int, *seconds: float, total: int = 0, **facts: Any) -> CallTimeline:
    """Of a call whose ranks have replied after ``seconds``, in their order. All have, unless ``total`` is higher."""
    times = sorted(seconds)
    replies = [RankReply(rank=rank, host=f"workers-{rank // 4}", seconds=each) for rank, each in enumerate(seconds)]
    known: dict[str, Any] = {
        "call": call,
        "mesh": "trainers",
        "endpoint": "step",
        "age": 10.0,
        "seconds": times[-1] if times else None,
        "total": max(total, len(times)),
        "answered": len(times),
        "first": times[0] if times else None,
        "half": times[(max(total, len(times)) - 1) // 2] if 2 * len(times) >= total else None,
        "replies": sorted(replies, key=lambda each: -each.seconds)[:16],
    }
    return CallTimeline.model_validate(known | facts)


class FakeSource:
    apply_id, _running, _ends_when_killed = "0123", None, True

    def __init__(self, hosts: int = 2, gpus: int = 2) -> None:
        self.reported = status(hosts, gpus)
        self.lines: list[PrintedLine] = []
        self.error: MeshgateError | None = None
        self.page_size = 3
        self.printed = b""  # by the run
        self.asked = 0
        self.ended: list[str] = []
        self.killed = False
        self.used: list[tuple[Any, ...]] = []  # what the ranks use
        self.unmeasured: dict[str, str] = {}
        self.measured = threading.Event()  # the session in which that was measured has ended
        self.stack_asked, self.stack_known = threading.Event(), threading.Event()
        self.stack_known.set()

    def call(self, endpoint: str, ended: int = 0, seconds: float = 0.0, **facts: Any) -> None:
        """Lets calls of the actors end."""
        session = self.reported.sessions[0]
        procs, actors = session.meshes
        before = actors.endpoints.get(endpoint, CallCounts())
        facts |= {"ended": before.ended + ended, "seconds": before.seconds + seconds}
        counts = before.model_copy(update=facts)
        actors = actors.model_copy(update={"endpoints": {**actors.endpoints, endpoint: counts}})
        session = session.model_copy(update={"meshes": (procs, actors)})
        self.reported = self.reported.model_copy(update={"sessions": (session,)})

    def show_timelines(self, *timelines: CallTimeline) -> None:
        (session,) = self.reported.sessions
        session = session.model_copy(update={"timelines": timelines})
        self.reported = self.reported.model_copy(update={"sessions": (session,)})

    def stack(self, asked: StackRequest) -> str:
        """What a process runs."""
        if self.error is not None:
            raise self.error
        self.stack_asked.set()
        assert self.stack_known.wait(300)
        return f"  runs <code> as {asked.mesh} {asked.rank} of session {asked.session} on {asked.host}"

    @contextlib.contextmanager
    def meter(self) -> Iterator[Meter]:
        """Looks at what ranks use."""
        if self.error is not None:
            raise self.error
        try:
            yield lambda: {"ranks": self.used, "problems": self.unmeasured}
        finally:
            self.measured.set()

    def end_session(self, name: str, cached_path: str | None) -> None:
        assert cached_path is None
        if self.error is not None:
            raise self.error
        self.ended.append(name)
        kept = tuple(session for session in self.reported.sessions if session.session != name)
        self.reported = self.reported.model_copy(update={"sessions": kept})

    def kill(self) -> None:
        if self.error is not None:
            raise self.error
        self.killed = True

    def make_sound(self) -> None:
        """Lets every host be ready and every rank be up."""
        hosts = tuple(host.model_copy(update={"state": "ready", "reason": ""}) for host in self.reported.hosts)
        session = self.reported.sessions[0]
        meshes = tuple(mesh.model_copy(update={"dead": {}, "ended": ()}) for mesh in session.meshes)
        session = session.model_copy(update={"hosts": hosts, "meshes": meshes})
        self.reported = self.reported.model_copy(update={"hosts": hosts, "sessions": (session,)})

    def end_ranks(self, mesh: int, *ended: EndedRanks, dead: dict[int, str] | None = None) -> None:
        """Lets ranks of a mesh of the session end."""
        session = self.reported.sessions[0]
        meshes = list(session.meshes)
        meshes[mesh] = meshes[mesh].model_copy(update={"ended": ended, "dead": dead or {}})
        session = session.model_copy(update={"meshes": tuple(meshes)})
        self.reported = self.reported.model_copy(update={"sessions": (session,)})

    def print(self, *texts: str) -> None:
        self.lines += [printed(len(self.lines) + 1 + at, text) for at, text in enumerate(texts)]

    def run(self, state: str, text: bytes, age: float = 10.0, **facts: Any) -> None:
        """Lets the job have a run that has printed ``text``."""
        self.printed = text
        described = {"name": "night", "state": state, "command": (), "age": age, "printed": len(text), **facts}
        self.reported = self.reported.model_copy(update={"runs": (RunStatus.model_validate(described),)})

    def _run_output(self, name: str, after: int) -> RunOutput:
        self.asked += 1
        data = base64.b64encode(self.printed[after : after + 8]).decode()
        return RunOutput(start=after, data=data, run=self.reported.runs[0])

    def status(self) -> JobStatus:
        if self.killed:
            raise JobNotRunning("the job is not running")
        if self.error is not None:
            raise self.error
        return self.reported

    def _output(self, after: dict[str, int]) -> OutputPage:
        fresh: Sequence[PrintedLine] = self.lines[after.get("s", 0) :][: self.page_size]
        return OutputPage(sessions=(SessionOutput(session="s", lines=tuple(fresh), last=len(self.lines)),))
