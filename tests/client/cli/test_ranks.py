"""``meshgate sync``, ``pull``, ``exec``, ``stacks`` and ``why``, with a job of this process."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from meshgate.cli import ranks
from meshgate.cli.app import app
from meshgate.cli.ranks import why
from meshgate.code_sync import session_sync
from meshgate.code_sync.push import SyncReport
from meshgate.errors import GatewayLostError, MeshgateError
from meshgate.ranks import OWN_MESHES
from meshgate.ranks.exec import CommandResult, Executed
from meshgate.ranks.stacks import Frame, ProcessStacks, Stacks, Thread
from meshgate.transfer.download import Pulled
from meshgate_wire.status import CallCounts, CallStatus, JobStatus, MeshStatus, RankReply, SessionStatus, Straggler
from tests.client.ui.sources import timeline

STEP = Frame("/work/train.py", 12, "Trainer.step", "loss.backward()")


def process(rank: int, mesh: str = "procs", session: str = "s") -> ProcessStacks:
    return ProcessStacks("workers-0", mesh, rank, 100 + rank, (Thread("actor", (STEP,)),), session=session)


def call(age: float, *waiting: int) -> CallStatus:
    return CallStatus(
        mesh="trainers",
        endpoint="step",
        age=age,
        total=4,
        answered=1,
        waiting=dict.fromkeys(waiting, "workers-0"),
        procs="procs",
        processes={rank: rank for rank in waiting},
    )


def status(*calls: CallStatus) -> JobStatus:
    session = SessionStatus(session="s", owner="me", connected=True, pid=1, calls=calls, calls_in_flight=len(calls))
    return JobStatus(gateway_version="1", python="3.11", meshes={"workers": 2}, sessions=(session,))


class Job:
    error: MeshgateError | None = None  # of its session

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.found = status(call(31, 2))

    def _state(self) -> None:
        self.asked.append("state")

    def status(self) -> JobStatus:
        return self.found

    def stacks(self, *arguments: Any) -> Stacks:
        return Stacks((process(2), process(3), process(2, "others")), {"lost": "gone"})

    def exec(self, command: Any, *arguments: Any, **options: Any) -> Executed:
        self.asked.append((command, arguments, options))
        return Executed({1: CommandResult(1, "workers-1", 3, "out", "err")})

    def _open_client(self, wanted: str) -> Any:
        return self

    def pull(self, *arguments: Any) -> Pulled:
        self.asked.append(arguments)
        return Pulled(files=1, size=5, travelled=3, left_out=("a.sock", "bad-\udcff"))


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    job = Job()
    monkeypatch.setattr(ranks, "find_job", lambda name, namespace: job)
    return job


def test_the_oldest_call_is_first_and_has_the_stacks_of_the_ranks_it_waits_for() -> None:
    report = why(status(call(1, 3), call(31, 2, 7)), Stacks((process(2), process(3), process(2, "others"))))
    assert [(each.call.age, [(p.mesh, p.rank) for p in each.processes]) for each in report.calls] == [
        (31, [("procs", 2)]),
        (1, [("procs", 3)]),
    ]
    assert "loss.backward()" in report.calls[0].processes[0].stack


def test_why_keeps_the_sessions_apart(run: CliRunner, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have a mesh of the same name on the same host."""
    first = status(call(31, 2))
    other = first.sessions[0].model_copy(update={"session": "other session"})
    job.found = first.model_copy(update={"sessions": (*first.sessions, other)})
    stacks = Stacks((process(2), process(2, session="other session"), process(2, session="a third")))
    monkeypatch.setattr(job, "stacks", lambda: stacks)
    reports = why(job.found, stacks).calls
    assert [(each.session, len(each.processes)) for each in reports] == [("s", 1), ("other session", 1)]
    text = run.invoke(app, ["why"]).output
    assert "session s: trainers.step" in text
    assert "session other se: trainers.step" in text


@pytest.mark.usefixtures("job")
def test_why_shows_calls_and_stacks(run: CliRunner) -> None:
    text = run.invoke(app, ["why"]).output
    assert "trainers.step, called 31s ago: 1 of 4 ranks answered; waits for rank 2 on workers-0 and 2 others" in text
    assert "  rank 2 on workers-0, pid 102:" in text
    assert "loss.backward()" in text
    assert json.loads(run.invoke(app, ["why", "--json"]).output)["calls"][0]["processes"][0]["rank"] == 2


def test_why_says_which_ranks_of_a_script_are_where_and_shows_one_of_each_place(
    run: CliRunner, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of ranks that are not among the first."""
    job.found = status(call(31, 0))
    load = (Frame("/work/train.py", 3, "load"),)
    scripts = [dataclasses.replace(process(rank), script=True) for rank in (0, 2, 3)]
    scripts.append(dataclasses.replace(process(1), script=True, threads=(Thread("thread", load),)))
    monkeypatch.setattr(job, "stacks", lambda: Stacks((process(1, "others"), *scripts)))
    lines = run.invoke(app, ["why"]).output.splitlines()
    assert lines[1] == "  3 of 4 ranks are in Trainer.step (train.py:12), rank 1 is in load (train.py:3)"
    assert [line for line in lines if "pid" in line] == [
        "  rank 0 on workers-0, pid 100:",
        "  rank 1 on workers-0, pid 101:",
    ]


@pytest.mark.parametrize("command", ["why", "stacks"])
def test_hosts_that_cannot_be_asked_are_named_and_a_failure_if_no_process_was_found(
    command: str, run: CliRunner, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = {"workers-0": "it is lost", "workers-1": "it is lost"}
    monkeypatch.setattr(job, "stacks", lambda *_: Stacks((process(2),), problems))
    found = run.invoke(app, [command])
    assert found.exit_code == 0
    assert "loss.backward()" in found.output
    assert "\nworkers-0, workers-1: it is lost\n" in found.output
    monkeypatch.setattr(job, "stacks", lambda *_: Stacks((), problems))
    found = run.invoke(app, [command, "--json"])
    assert found.exit_code == 1
    assert json.loads(found.stdout)["problems"] == problems
    assert found.stderr == "meshgate: no process could be read: workers-0, workers-1: it is lost\n"


def test_why_of_an_idle_job_asks_no_process(run: CliRunner, job: Job) -> None:
    job.found = status()
    assert run.invoke(app, ["why"]).output == "no call is in flight\n"
    (session,) = job.found.sessions
    keeps = MeshStatus(kind="procs", name="procs", sizes={}, kept=4_200_000)
    job.found = job.found.model_copy(update={"sessions": (session.model_copy(update={"meshes": (keeps, keeps)}),)})
    assert run.invoke(app, ["why"]).output.endswith("values that stay in processes: procs 8.4 MB\n")
    assert json.loads(run.invoke(app, ["why", "--json"]).output)["kept"] == {"procs": 8_400_000}
    assert job.asked == []


def test_why_names_ranks_that_are_often_late(run: CliRunner, job: Job) -> None:
    often = Straggler(rank=5, host="workers-1", calls=43, seconds=43 * 0.812)
    seldom = Straggler(rank=2, host="workers-0", calls=24, seconds=99.0)
    enough = Straggler(rank=3, calls=25, seconds=25 * 2.0)
    few = CallCounts(compared=3, stragglers=(Straggler(rank=0, calls=3, seconds=3.0),))
    actors = MeshStatus(
        kind="actors",
        name="trainers",
        sizes={"gpus": 8},
        endpoints={"step": CallCounts(compared=100, stragglers=(seldom, often, enough)), "evaluate": few},
    )
    job.found = status()
    (session,) = job.found.sessions
    job.found = job.found.model_copy(update={"sessions": (session.model_copy(update={"meshes": (actors,)}),)})
    assert run.invoke(app, ["why"]).output.splitlines() == [
        "no call is in flight",
        "trainers.step waits for rank 5 on workers-1: it replied last in 43 of the last 100 calls, on average 812.0ms "
        "after half of the ranks",
        "trainers.step waits for rank 3: it replied last in 25 of the last 100 calls, on average 2.0s after half of "
        "the ranks",
    ]
    late, _ = json.loads(run.invoke(app, ["why", "--json"]).output)["stragglers"]
    assert (late["rank"], late["calls"], late["compared"]) == (5, 43, 100)
    assert late["seconds"] == pytest.approx(0.812)


def test_why_shows_when_ranks_replied_in_recent_calls_on_request(run: CliRunner, job: Job) -> None:
    late = timeline(7, 1.0, 0.8, 1.2, 4.0, straggler=3, age=60.0)
    raised = (RankReply(rank=1, seconds=2.0, raised=True), RankReply(rank=0, host="workers-0", seconds=0.5))
    failed = timeline(8, 0.5, 2.0, replies=raised, failed=True, age=8.0, mesh="others", total=3, missing={5: ""})
    facts = {"answered": 1000, "half": 2.0, "missing": {9: "workers-1"}, "seconds": None, "cancelled": True}
    running = timeline(9, 2.0, 2.0, total=1024, age=8.0, **facts)
    own = timeline(10, 1.0, 1.0, mesh=sorted(OWN_MESHES)[0])
    empty = timeline(11, total=2, seconds=None, age=0.0, missing={0: "", 1: ""})
    job.found = status()
    (session,) = job.found.sessions
    sessions = (session.model_copy(update={"timelines": (empty, running, failed, own, late)}),)
    job.found = job.found.model_copy(update={"sessions": sessions})
    lines = run.invoke(app, ["why", "--timelines"]).output.splitlines()
    bar = "\N{FULL BLOCK}"
    dots = "\N{MIDDLE DOT}" * 24
    assert lines == [
        "no call is in flight",
        "",
        "trainers.step, called 8s ago, in flight, cancelled: 1000 of 1024 ranks replied, half of them after 2.0s",
        f"  rank 9 on workers-1  {dots}  no reply",
        f"  rank 0 on workers-0  {bar * 6:24}  2.0s",
        f"  rank 1 on workers-0  {bar * 6:24}  2.0s",
        "  and 23 more without a reply",
        "  and 998 more that replied earlier",
        "",
        "trainers.step, called 0s ago, in flight: 0 of 2 ranks replied",
        f"  rank 0  {dots}  no reply",
        f"  rank 1  {dots}  no reply",
        "",
        "others.step, called 8s ago, took 2.0s, failed: 2 of 3 ranks replied, half of them after 2.0s",
        f"  rank 5               {dots}  no reply before it failed",
        f"  rank 1               {bar * 24}  2.0s raised",
        f"  rank 0 on workers-0  {bar * 6:24}  500.0ms",
        "",
        "trainers.step, called 1m ago, took 4.0s: 4 of 4 ranks replied, half of them after 1.0s",
        f"  rank 3 on workers-0  {bar * 24}  4.0s straggler",
        f"  rank 2 on workers-0  {bar * 7:24}  1.2s",
        f"  rank 0 on workers-0  {bar * 6:24}  1.0s",
        f"  rank 1 on workers-0  {bar * 5:24}  800.0ms",
    ]
    other = session.model_copy(update={"session": "other session", "timelines": (late,)})
    job.found = job.found.model_copy(update={"sessions": (*sessions, other)})
    assert "session other se: trainers.step, called 1m ago" in run.invoke(app, ["why", "--timelines"]).output
    recent = json.loads(run.invoke(app, ["why", "--timelines", "--json"]).output)["recent"]
    assert [each["timeline"]["call"] for each in recent] == [9, 11, 8, 7, 7]
    assert json.loads(run.invoke(app, ["why", "--json"]).output)["recent"] is None


def test_why_says_that_there_are_no_timelines(run: CliRunner, job: Job) -> None:
    job.found = status()
    assert "no recent call went to several ranks" in run.invoke(app, ["why", "--timelines"]).output


@pytest.mark.parametrize(
    ("ranks", "late", "named"),
    [(2, 74, False), (2, 75, True), (4, 49, False), (4, 50, True), (8, 24, False), (8, 25, True), (1024, 25, True)],
)
def test_why_names_no_rank_that_is_late_by_chance(ranks: int, late: int, named: bool) -> None:
    step = CallCounts(compared=100, stragglers=(Straggler(rank=1, calls=late, seconds=9.0),))
    (session,) = status().sessions
    for name, expected in (("trainers", named), ("exec", named), ("meshgate_exec", False)):
        actors = MeshStatus(kind="actors", name=name, sizes={"gpus": ranks}, endpoints={"step": step})
        looked = status().model_copy(update={"sessions": (session.model_copy(update={"meshes": (actors,)}),)})
        assert bool(why(looked, Stacks(())).stragglers) == expected


@pytest.mark.usefixtures("job")
def test_stacks_shows_equal_ones_once(run: CliRunner) -> None:
    text = run.invoke(app, ["stacks"]).output
    assert text.count("loss.backward()") == 1
    assert "procs ranks 2-3, others rank 2 (3 processes):" in text
    found = json.loads(run.invoke(app, ["stacks", "--json"]).output)
    assert [each["rank"] for each in found["processes"]] == [2, 3, 2]
    assert found["problems"] == {"lost": "gone"}


def test_exec_passes_its_options_on_and_exits_with_the_code(run: CliRunner, job: Job) -> None:
    arguments = ["exec", "job", "--rank", "1", "-e", "A=b=c", "--timeout", "5", "--json", "--", "ls", "-l"]
    result = run.invoke(app, arguments)
    assert result.exit_code == 3
    assert json.loads(result.output)["results"][0]["stdout"] == "out"
    _, (command, (chosen, mesh), options) = job.asked
    assert (command, chosen, mesh) == (["ls", "-l"], [1], None)
    assert (options["env"], options["timeout"], options["capture_output"]) == ({"A": "b=c"}, 5, True)


@pytest.mark.usefixtures("job")
def test_a_variable_without_a_value_is_refused(run: CliRunner) -> None:
    result = run.invoke(app, ["exec", "job", "-e", "A", "--", "ls"])
    assert (result.exit_code, "expected NAME=VALUE" in result.output) == (2, True)


class FakeSync:
    """Reports ``saves`` after the first push. Then watching fails, or the session ends with ``error``."""

    def __init__(self, job: Job, saves: int, error: MeshgateError | None) -> None:
        self.job, self.saves, self.error = job, saves, error

    def push_and_wait(self, *, watch: bool, quiet: bool, show: Callable[[SyncReport], object] | None) -> None:
        self.show = show or print
        self.show(REPORT)

    @property
    def watching(self) -> bool:
        self.saves -= 1
        if self.saves >= 0:
            self.show(dataclasses.replace(REPORT, version=f"save {self.saves}"))
        else:
            self.job.error = self.error
        return self.saves >= 0 or self.error is not None


REPORT = SyncReport(version="cafe", files=2, nbytes=7, ready=2, hosts=2, seconds=0.5)


@pytest.fixture
def start_sync(job: Job, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def start(saves: int = 0, error: MeshgateError | None = None) -> None:
        def sync_for(client: Job, sync_dirs: list[str] | None) -> FakeSync:
            client.asked.append(sync_dirs)
            return FakeSync(client, saves, error)

        monkeypatch.setattr(session_sync, "sync_for", sync_for)

    return start


def test_sync_pushes_directories_in_a_session_and_reports_it(
    run: CliRunner, job: Job, start_sync: Callable[..., None]
) -> None:
    start_sync()
    (line,) = run.invoke(app, ["sync", "--dir", "a", "--dir", "b", "--json"]).stdout.splitlines()
    assert job.asked == ["state", ["a", "b"]]
    assert json.loads(line) == {"version": "cafe", "files": 2, "nbytes": 7, "ready": 2, "hosts": 2, "seconds": 0.5}


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("error", [None, GatewayLostError("the job was ended")])
def test_a_watch_prints_each_sync_on_a_line_and_ends_with_the_session(
    run: CliRunner, start_sync: Callable[..., None], error: MeshgateError | None
) -> None:
    start_sync(2, error)
    result = run.invoke(app, ["sync", "--watch", "--json"])
    assert [json.loads(line)["version"] for line in result.stdout.splitlines()] == ["cafe", "save 1", "save 0"]
    why = "meshgate: the job was ended\n" if error else ""
    assert (result.exit_code, result.stderr) == (1, f"watching; Ctrl-C ends it\n{why}")


def test_pull_reports_what_it_left_out(run: CliRunner, job: Job) -> None:
    printed = json.loads(run.invoke(app, ["pull", "/there", "here", "--rank", "1", "--json"]).output)
    assert job.asked == [("/there", "here", [1], None)]
    assert printed == {"files": 1, "size": 5, "travelled": 3, "left_out": ["a.sock", r"bad-\udcff"]}
