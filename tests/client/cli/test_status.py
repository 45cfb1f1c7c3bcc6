"""``meshgate status`` and ``meshgate describe``."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from typer.testing import CliRunner

from meshgate.cli import status
from meshgate.cli.app import app
from meshgate.cli.models import ClusterEvent, JobRow
from meshgate.cli.status import (
    Description,
    Sessions,
    lost_lines,
    lost_ranks,
    show_description,
    show_sessions,
    show_status,
    waiting_text,
)
from meshgate.jobs.sessions import EndedSession, SessionInfo, SessionList
from meshgate.progress import new_console
from meshgate_wire.status import (
    CallStatus,
    EndedRanks,
    HostStatus,
    JobStatus,
    MeshStatus,
    RunStatus,
    SessionStatus,
    SlurmAllocation,
)
from tests.client.cli.looks import LIKE_MARKUP

CALL = CallStatus(
    mesh="trainers", endpoint="step", age=31, total=8, answered=2, waiting=dict.fromkeys(range(1, 7), "workers-0")
)
HOSTS = (
    HostStatus(mesh="workers", rank=0, name="workers-0", version="cafe" * 16),
    HostStatus(mesh="workers", rank=1, name="workers-1", state="missing", reason="OOMKilled"),
)
KILLED = EndedRanks(ranks=((1, 1), (3, 3)), reason="killed")
SESSION = SessionStatus(
    session="0123456789abcdef",
    owner="job",
    connected=False,
    pid=7,
    version="cafe" * 16,
    hosts=HOSTS,
    meshes=(
        MeshStatus(kind="procs", name="procs", sizes={"hosts": 2, "gpus": 4}, version="beef" * 16),
        MeshStatus(kind="actors", name="trainers", sizes={"hosts": 2}, ended=(KILLED,)),
    ),
    calls=(CALL,),
    calls_in_flight=1,
)
STATUS = JobStatus(gateway_version="1.2", python="3.11.7", meshes={"workers": 2}, hosts=HOSTS, sessions=(SESSION,))


TRAIN = SessionInfo(
    id="0123456789abcdef" * 2,
    name="train",
    detached=True,
    age=120,
    holder="me@laptop (pid 7)",
    actors=("trainers", "generators", "a", "b"),
    procs=("procs",),
    calls_in_flight=3,
    calls_finished=2,
    unread_lines=40,
    code_version="cafe" * 16,
)


def test_runs_that_are_active_and_ended_unseen_are_named() -> None:
    described = [
        {"name": "night", "state": "running"},
        {"name": "broken", "state": "failed", "exit_code": 3, "reason": "exited with code 3", "news": True},
        {"name": "seen", "state": "succeeded", "exit_code": 0},
    ]
    runs = tuple(RunStatus.model_validate({"command": (), "age": 60, **each}) for each in described)
    lines = shown(STATUS.model_copy(update={"runs": runs})).splitlines()
    assert "runs      1 active, 1 ended since `meshgate runs` was last called" in lines
    assert [line.split() for line in lines if "night" in line] == [["night", "running", "1m"]]
    assert [line.split()[:4] for line in lines if "broken" in line] == [["broken", "*", "failed", "3"]]
    assert not any("seen" in line.split() for line in lines)
    assert "runs" not in shown(STATUS)


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        (
            {"state": "RUNNING", "partition": "gpu", "account": "physics", "qos": "high", "seconds_left": 720.0},
            "slurm     job 7 RUNNING, partition gpu, account physics, qos high, 12m of 1h left",
        ),
        ({"state": "PENDING", "partition": "gpu"}, "slurm     job 7 PENDING, partition gpu, time limit 1h"),
        ({"state": "RUNNING", "time_limit": None}, "slurm     job 7 RUNNING"),
    ],
)
def test_what_slurm_has_allocated_is_shown(facts: dict[str, Any], line: str) -> None:
    slurm = SlurmAllocation.model_validate({"job_id": 7, "time_limit": 3600.0, **facts})
    assert line in shown(STATUS.model_copy(update={"slurm": slurm})).splitlines()
    assert "slurm" not in shown(STATUS)


def shown(status: JobStatus | Description) -> str:
    text = io.StringIO()
    console = new_console(file=text, width=200, soft_wrap=True)
    if isinstance(status, JobStatus):
        show_status(status, console)
    else:
        show_description(status, console)
    return text.getvalue()


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_the_status_shows_hosts_meshes_and_calls() -> None:
    text = shown(STATUS)
    assert "session 01234567  job, disconnected, code cafecafecafe" in text
    assert ["workers-0", "workers", "0", "ready", "cafecafecafe"] in rows(text)
    assert ["workers-1", "workers", "1", "missing:", "OOMKilled"] in rows(text)
    assert ["procs", "procs", "hosts=2", "gpus=4", "beefbeefbeef", "up"] in rows(text)
    assert ["trainers", "actors", "hosts=2", "2", "lost"] in rows(text)
    assert "  1 call in flight\n" in text
    keeping = SESSION.model_copy(
        update={"meshes": tuple(each.model_copy(update={"kept": 4**11}) for each in SESSION.meshes)}
    )
    text = shown(STATUS.model_copy(update={"sessions": (keeping,)}))
    assert "up; keeps 4.2 MB" in text
    assert "2 lost; keeps 4.2 MB" in text
    assert "trainers.step" in text
    assert "31s" in text
    assert "2/8" in text


def test_the_name_of_a_detached_session_is_shown_unless_it_is_that_of_its_id() -> None:
    for name, expected in (("train [0]", "01234567 train [0]"), ("01234567", "01234567"), ("", "01234567")):
        session = SESSION.model_copy(update={"name": name})
        assert f"\nsession {expected}  job, " in shown(STATUS.model_copy(update={"sessions": (session,)}))


def with_ends(procs: tuple[EndedRanks, ...], actors: tuple[EndedRanks, ...]) -> SessionStatus:
    """The session, with ranks of its processes and of actors on them that ended."""
    meshes = (
        MeshStatus(kind="actors", name="trainers", number=3, procs=2, sizes={"gpus": 1024}, ended=actors),
        MeshStatus(kind="procs", name="procs", number=2, sizes={"gpus": 1024}, ended=procs),
        MeshStatus(kind="procs", name="meshgate_exec", number=4, sizes={"gpus": 1024}, ended=procs),
    )
    return SESSION.model_copy(update={"meshes": meshes})


def lost_of(session: SessionStatus) -> list[str]:
    return [
        line.strip()
        for line in shown(STATUS.model_copy(update={"sessions": (session,)})).splitlines()
        if "lost:" in line or "more lost" in line
    ]


def test_lost_ranks_are_shown_by_reason_with_their_exit_code_and_age() -> None:
    killed = EndedRanks(
        ranks=((3, 3), (5, 7)), reason="killed by SIGKILL (out of memory?)", exit_code=-9, age=130, last_age=125
    )
    failed = EndedRanks(ranks=((2, 3), (9, 9)), reason="KeyError: '[red]'", age=3700, last_age=5)
    stopped = EndedRanks(ranks=((20, 29),), reason="stopped by the program", age=9, last_age=9, stopped=True)
    session = with_ends((killed,), (stopped, killed, failed))
    assert lost_of(session) == [
        "lost: trainers ranks 2, 9: KeyError: '[red]', first 1h1m ago, last 5s ago",
        "lost: procs ranks 3, 5-7: killed by SIGKILL (out of memory?), 2m5s ago",
    ]
    text = rows(shown(STATUS.model_copy(update={"sessions": (session,)})))
    assert ["trainers", "actors", "gpus=1024", "6", "lost,", "10", "stopped"] in text
    assert ["procs", "procs", "gpus=1024", "4", "lost"] in text
    found = lost_ranks(session)
    assert [(each.mesh, each.ranks, each.exit_code, each.age) for each in found] == [
        ("procs", [3, 5, 6, 7], -9, 130),
        ("trainers", [2, 9], None, 3700),
    ]


def test_a_thousand_lost_ranks_take_few_lines() -> None:
    odd = EndedRanks(
        ranks=tuple((rank, rank) for rank in range(1, 1024, 2)), reason="its process ended", age=1, last_age=1
    )
    even = tuple(
        EndedRanks(ranks=((rank, rank),), reason=f"code {rank}", age=1, last_age=1) for rank in range(0, 1024, 2)
    )
    lines = lost_of(with_ends((odd, *even), ()))
    assert lines[0] == "lost: procs ranks 1, 3, 5, 7, 9, 11, 13, 15 and 504 more: its process ended, 1s ago"
    assert (len(lines), lines[-1]) == (9, "and 505 more lost ranks")


def test_the_ranks_that_were_lost_last_are_shown_if_not_all_can_be() -> None:
    old = EndedRanks(ranks=((0, 0),), reason="exited with code 1", age=900, last_age=900)
    new = old.model_copy(update={"age": 70, "last_age": 9})
    unknown = old.model_copy(update={"age": None, "last_age": None})
    meshes = tuple(
        MeshStatus(kind="procs", name=name, number=number, sizes={"gpus": 1}, ended=(ended,))
        for number, (name, ended) in enumerate([("first", unknown), ("second", old), ("", new)])
    )
    lost = lost_ranks(SESSION.model_copy(update={"meshes": meshes}))
    newest = "lost: an endpoint's mesh rank 0: exited with code 1, first 1m10s ago, last 9s ago"
    assert lost_lines(lost, 1) == [newest, "and 2 more lost ranks"]
    assert lost_lines(lost, 2) == [newest, "lost: second rank 0: exited with code 1, 15m ago", "and 1 more lost rank"]
    assert lost_lines(lost, 3)[2:] == ["lost: first rank 0: exited with code 1"]


def test_a_host_that_the_cluster_is_about_to_end_is_shown_with_its_time_and_reason() -> None:
    ending = HOSTS[0].model_copy(update={"seconds_left": 23.7, "reason": "its pod is being deleted"})
    text = shown(STATUS.model_copy(update={"sessions": (SESSION.model_copy(update={"hosts": (ending,)}),)}))
    assert "ends in 24 s: its pod is being deleted" in text


def test_the_ranks_that_a_call_waits_for_are_named_up_to_a_limit() -> None:
    named = ", ".join(f"rank {rank} on workers-0" for rank in range(1, 5))
    assert waiting_text(CALL) == f"{named} and 2 others"
    assert waiting_text(CALL.model_copy(update={"total": 3, "waiting": {1: ""}})) == "rank 1"


def test_a_job_without_sessions_shows_its_hosts() -> None:
    text = shown(STATUS.model_copy(update={"sessions": ()}))
    assert "sessions  0\n" in text
    assert "workers-1" in text


def test_the_problem_of_an_engine_is_shown() -> None:
    silent = SESSION.model_copy(update={"problem": "its engine did not answer within 3 s", "connected": True})
    text = shown(STATUS.model_copy(update={"sessions": (silent,)}))
    assert "connected" in text
    assert "its engine did not answer" in text


def test_a_description_shows_objects_and_events_and_leaves_out_what_is_empty() -> None:
    job = JobRow(id="train", kind="KubernetesJob", namespace="team", meshes={"workers": 2}, age=7200)
    event = ClusterEvent(object="Pod/train-0", reason="BackOff", message="pulling failed", count=3)
    found = Description(job=job, gateway="the gateway of train", objects=["Pod/train-0"], events=[event], status=STATUS)
    text = shown(found)
    assert ["namespace", "team"] in rows(text)
    assert ["age", "2h"] in rows(text)
    gateways = [line for line in text.splitlines() if line.startswith("gateway")]
    assert gateways == ["gateway   the gateway of train, meshgate 1.2, Python 3.11.7"]
    assert ["Pod/train-0", "BackOff", "3", "pulling", "failed"] in rows(text)
    assert "directory" not in text
    elsewhere = found.model_copy(update={"job": job.model_copy(update={"age": None})})
    assert not any(row[:1] == ["age"] for row in rows(shown(elsewhere)))


DIED = EndedSession(id="ab" * 16, name="night", kind="died", reason="it died", output="the [last] words\n", ago=60)


class Job:
    def _list_sessions(self, cached_path: str | None) -> SessionList:
        assert cached_path is None  # the command has found the job
        return SessionList(sessions=[TRAIN], ended=[DIED])


def shown_sessions(*found: SessionInfo) -> list[str]:
    text = io.StringIO()
    show_sessions(Sessions(sessions=list(found)), new_console(file=text, width=250, soft_wrap=True))
    return text.getvalue().splitlines()


def test_the_sessions_of_the_job_are_listed(run: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "find_job", lambda job, namespace: Job())
    found = json.loads(run.invoke(app, ["sessions", "--json"]).output)
    assert (found["sessions"][0]["name"], found["ended"][0]["name"]) == ("train", "night")
    lines = run.invoke(app, ["sessions"]).output.splitlines()
    assert lines[-2].startswith("session 'night' ended at ")
    assert lines[-2].endswith(": it died; its last output:")
    assert lines[-1] == "the [last] words"


def test_a_session_is_one_line() -> None:
    _, line = shown_sessions(TRAIN)
    assert line.split("  ")[0] == "train"
    for part in (
        "01234567",
        "left, detached",
        "2m",
        "trainers,generators,a,b,… (5)",
        "cafecafecafe",
        "me@laptop (pid 7)",
    ):
        assert part in line
    assert [word for word in line.split() if word.isdecimal() and len(word) < 8] == ["3", "2", "40"]


def test_a_session_that_does_not_answer_says_so() -> None:
    assert (
        "its engine did not answer" in shown_sessions(SessionInfo(id="ab" * 16, error="its engine did not answer"))[1]
    )
    assert "held" in shown_sessions(SessionInfo(id="ab" * 16, connected=True))[1]
    assert shown_sessions() == ["the job has no sessions"]


@pytest.mark.parametrize("odd", LIKE_MARKUP)
def test_text_in_brackets_is_shown_as_it_is(odd: str) -> None:
    ran = RunStatus(name=f"1{odd}", state="failed", command=(), age=1, reason=f"2{odd}", news=True)
    host = HostStatus(mesh="workers", rank=0, name=f"3{odd}", state="missing", reason=f"4{odd}")
    mesh = MeshStatus(kind="procs", name=f"5{odd}", sizes={}, ended=(KILLED.model_copy(update={"reason": f"6{odd}"}),))
    call = CALL.model_copy(update={"endpoint": f"7{odd}"})
    facts = {"owner": f"8{odd}", "problem": f"9{odd}", "name": f"10{odd}", "hosts": (host,), "meshes": (mesh,)}
    session = SESSION.model_copy(update={**facts, "calls": (call,)})
    state = STATUS.model_copy(update={"meshes": {f"11{odd}": 2}, "runs": (ran,), "sessions": (session,)})
    job = JobRow(id="train", kind="KubernetesJob", namespace=f"12{odd}", meshes={}, age=1, directory=f"13{odd}")
    event = ClusterEvent(object=f"14{odd}", reason="BackOff", message=f"15{odd}", count=3)
    text = shown(Description(job=job, gateway=f"16{odd}", objects=[f"17{odd}"], events=[event], status=state))
    assert [number for number in range(1, 18) if f"{number}{odd}" not in text] == []
    info = SessionInfo(id="ab" * 16, name=f"1{odd}", holder=f"2{odd}", error=f"3{odd}", actors=(f"4{odd}",))
    row = shown_sessions(info)[1]
    assert [number for number in range(1, 5) if f"{number}{odd}" not in row] == []
