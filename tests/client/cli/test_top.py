"""``meshgate top`` of a job of this process."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from meshgate.cli import top as top_module
from meshgate.cli.app import app
from meshgate.cli.models import Top
from meshgate.cli.top import Order, look, render
from meshgate.errors import ConnectionFailedError
from meshgate.jobs import runs
from meshgate.progress import new_console
from meshgate.ranks.usage import Gpu, Usage
from meshgate_wire.status import CallCounts, EndedRanks, JobStatus, Straggler
from tests.client.cli.looks import GIB, LIKE_MARKUP, compare, process, status, top


class Job:
    _hosts: dict[str, Any] = {}  # noqa: RUF012
    _running: Any = None

    def __init__(self, *counts: CallCounts) -> None:
        self.counts = list(counts)

    def _state(self) -> Job:
        return self

    def status(self) -> JobStatus:
        return status(self.counts.pop(0))

    def __repr__(self) -> str:
        return "the job"


def test_the_command_prints_one_look_or_an_object_on_each_line(run: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_module, "FIRST_INTERVAL", 0.0)
    job = Job(CallCounts(), CallCounts(ended=3, seconds=0.3))
    monkeypatch.setattr(top_module, "find_job", lambda name, namespace: job)
    text = run.invoke(app, ["top", "--once"]).output
    assert "trainers  abcdef01" in text
    assert "100.0ms" in text
    job.counts = [CallCounts(), CallCounts(ended=3, seconds=0.3)]
    (call,) = json.loads(run.invoke(app, ["top", "--once", "--json"]).output)["calls"]
    assert call["ended"] == 3
    job.counts = [CallCounts(ended=count) for count in (0, 1, 3)]
    result = run.invoke(app, ["top", "--interval", "0.5", "--json"])
    assert [json.loads(line)["calls"][0]["ended"] for line in result.output.splitlines()] == [1, 2]
    assert isinstance(result.exception, IndexError)  # the job of this test has no more to say


def test_an_outage_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "RETRY", 0.0)
    job = Job(CallCounts(), CallCounts(ended=3))
    job._running = SimpleNamespace(_has_ended=lambda: False)
    answers = [job.status(), ConnectionFailedError("no answer"), ConnectionFailedError("no answer"), job.status()]
    monkeypatch.setattr(job, "status", Mock(side_effect=answers))
    looks = look(job, SimpleNamespace(read=Usage), 0.0, 0.0)  # type: ignore[arg-type]
    assert [call.ended for call in next(looks).calls] == [3]


def test_rates_are_what_happened_between_two_looks() -> None:
    (call,) = top().calls
    assert (call.mesh, call.ranks, call.ended, call.failed, call.casts) == ("trainers", 2, 20, 4, 8)
    assert (call.rate, call.latency, call.in_flight, call.oldest) == (7.0, 0.025, 3, 3.0)


def test_a_mesh_that_is_new_counts_from_its_spawn_and_an_older_gateway_reports_none() -> None:
    (new,) = compare(status(None), status(CallCounts(ended=4, seconds=1.0)), 2.0, Usage()).calls
    assert (new.rate, new.latency) == (2.0, 0.25)
    (old,) = compare(status(None), status(None), 2.0, Usage()).calls
    assert (old.rate, old.latency) == (0.0, None)


def test_calls_are_counted_since_the_last_look_that_the_engine_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = status(None, problem="its engine did not answer")
    (session,) = silent.sessions
    silent = silent.model_copy(update={"sessions": (session.model_copy(update={"meshes": ()}),)})
    counts = [status(CallCounts(ended=1000 + 10 * number, failed=50)) for number in range(4)]
    job = Job()
    answers = [silent, silent, counts[0], counts[1], silent, silent, counts[2], counts[3]]
    monkeypatch.setattr(job, "status", Mock(side_effect=answers))
    monkeypatch.setattr(top_module, "time", SimpleNamespace(monotonic=count(0.0, 2.0).__next__, sleep=lambda _: None))
    looks = look(job, SimpleNamespace(read=Usage), 0.0, 0.0)  # type: ignore[arg-type]
    found = [next(looks) for _ in range(7)]
    shown = [[(call.ended, call.failed, round(call.rate, 1)) for call in each.calls] for each in found]
    assert shown == [[], [(0, 0, 0.0)], [(10, 0, 2.5)], [], [], [(10, 0, 0.8)], [(10, 0, 2.5)]]


def test_the_oldest_call_is_that_of_the_mesh_and_not_of_another_one_with_its_name() -> None:
    now = status(None, age=31.0)
    (session,) = now.sessions
    dead = session.meshes[1].model_copy(update={"number": 9})
    calls = (session.calls[0].model_copy(update={"mesh_number": 2}),)
    session = session.model_copy(update={"meshes": (dead, session.meshes[1]), "calls": calls})
    now = now.model_copy(update={"sessions": (session,)})
    assert [call.oldest for call in compare(now, now, 2.0, Usage()).calls] == [None, 31.0]


def test_gpus_of_a_rank_are_averaged_and_its_own_memory_is_preferred() -> None:
    gpus = [Gpu("workers-0", 0, 20, GIB, 8 * GIB), Gpu("workers-0", 1, 60, GIB, 8 * GIB)]
    gpus.append(Gpu("workers-1", 0, 99, GIB, 8 * GIB))
    usage = Usage([process(0, gpus=(0, 1)), process(1, gpus=(0,), gpu_memory=5), process(2)], gpus)
    ranks = compare(status(None), status(None), 1.0, usage).ranks
    assert [(rank.gpu, rank.gpu_memory) for rank in ranks] == [(40, 2 * GIB), (99, 5), (None, None)]


def lines(shown: Top, width: int, height: int | None = None, order: Order = "rank") -> list[str]:
    console = new_console(file=io.StringIO(), width=width)
    console.print(render(shown, "the job", width=width, height=height, order=order))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("odd", LIKE_MARKUP)
def test_text_in_brackets_is_shown_as_it_is(odd: str) -> None:
    usage = Usage([replace(process(0), mesh=f"1{odd}", host=f"2{odd}")], problems={f"3{odd}": f"4{odd}"})
    text = "\n".join(lines(compare(status(None, problem=f"5{odd}"), status(None, problem=f"5{odd}"), 1.0, usage), 200))
    assert [number for number in range(1, 6) if f"{number}{odd}" not in text] == []


def test_gpus_have_columns_if_a_host_has_any() -> None:
    gpus = [Gpu("workers-1", 0, 99, GIB, 8 * GIB)]
    usage = Usage([process(1, gpus=(0,), gpu_memory=5), process(2)], gpus)
    text = lines(compare(status(None), status(None), 1.0, usage), 120)
    assert text[-3:-1] == [
        "procs  workers-1     1  101  50%   3.0Gi     0  99%         0Ki",
        "procs  workers-2     2  102  50%   3.0Gi     -    -           -",
    ]


def test_a_wide_terminal_shows_everything() -> None:
    assert [line.rstrip() for line in lines(top(problems={"workers-9": "lost\nmore"}), 100)] == [
        "the job",
        "ACTORS    SESSION   CALLS/S  LATENCY  FAILED  IN FLIGHT  OLDEST",
        "trainers  abcdef01      7.0   25.0ms       4          3      3s",
        "",
        "PROCS  HOST       RANK  PID  CPU  MEMORY",
        "procs  workers-0     0  100  50%   3.0Gi",
        "procs  workers-1     1  101  50%   3.0Gi",
        "",
        "workers-9: lost",
    ]


def test_the_rank_that_others_have_waited_for_is_shown_if_the_terminal_is_wide() -> None:
    stragglers = (Straggler(rank=2, calls=1, seconds=3.0), Straggler(rank=5, calls=43, seconds=43 * 0.812))
    step = CallCounts(compared=100, stragglers=stragglers)
    other = CallCounts(compared=2, stragglers=(Straggler(rank=1, calls=2, seconds=1.0),))
    now = status(None, endpoints={"step": step, "evaluate": other})
    look = compare(now, now, 1.0, Usage())
    assert look.calls[0].straggler is not None
    assert (look.calls[0].straggler.endpoint, look.calls[0].straggler.rank) == ("step", 5)
    assert [line.rstrip() for line in lines(look, 110)[1:3]] == [
        "ACTORS    SESSION   CALLS/S  LATENCY  FAILED  IN FLIGHT  OLDEST            STRAGGLER",
        "trainers  abcdef01      0.0        -       0          0      3s  rank 5 43% +812.0ms",
    ]
    assert not any("STRAGGLER" in line for line in lines(look, 109))


def test_what_processes_keep_is_shown() -> None:
    look = compare(status(None), status(None, kept=4_200_000), 1.0, Usage([process(rank) for rank in range(40)]))
    assert look.kept == {"procs": 4_200_000}
    text = lines(look, 100, height=24)
    assert len(text) <= 24
    assert text[-1].strip() == "values that stay in processes: procs 4.2 MB"


def test_what_each_rank_keeps_is_shown_if_one_keeps_something() -> None:
    usage = Usage([process(0), process(1)])
    look = compare(status(None), status(None, kept=4_200_000), 1.0, usage)
    assert [rank.kept for rank in look.ranks] == [0, 4_200_000]
    text = lines(look, 100)
    assert [line.rstrip() for line in text[-5:-2]] == [
        "PROCS  HOST       RANK  PID  CPU  MEMORY  KEPT",
        "procs  workers-0     0  100  50%   3.0Gi   0Ki",
        "procs  workers-1     1  101  50%   3.0Gi   4Mi",
    ]


def test_what_a_rank_keeps_is_unknown_if_several_sessions_have_its_mesh() -> None:
    now = status(None, kept=4_200_000)
    (session,) = now.sessions
    stopped = EndedRanks(ranks=((0, 1),), reason="stopped by the program", stopped=True)
    ended = tuple(each.model_copy(update={"ended": (stopped,)}) for each in session.meshes)
    for meshes, expected in ((ended, [0, 4_200_000]), (session.meshes, [None, None])):
        both = now.model_copy(update={"sessions": (session, session.model_copy(update={"meshes": meshes}))})
        look = compare(both, both, 1.0, Usage([process(0), process(1)]))
        assert [rank.kept for rank in look.ranks] == expected


def test_lost_ranks_are_shown_even_if_no_process_of_their_mesh_is_left() -> None:
    ended = tuple(
        EndedRanks(ranks=((at, at),), reason=f"exited with code {at}", exit_code=at, age=5) for at in range(128)
    )
    now = status(None)
    (session,) = now.sessions
    meshes = tuple(each.model_copy(update={"sizes": {"gpus": 128}, "ended": ended}) for each in session.meshes)
    both = (session, session.model_copy(update={"meshes": meshes}))
    look = compare(now, now.model_copy(update={"sessions": both}), 1.0, Usage([process(0)]))
    assert [(each.mesh, each.ranks, each.exit_code) for each in look.lost] == [("procs", [at], at) for at in range(128)]
    assert look.ranks[0].kept == 0  # the process must be of the other session
    text = lines(look, 60, height=24)
    assert len(text) <= 24
    assert [line.rstrip() for line in text[-4:]] == [
        "lost: procs rank 0: exited with code 0",
        "lost: procs rank 1: exited with code 1",
        "lost: procs rank 2: exited with code 2",
        "and 125 more lost ranks",
    ]


@pytest.mark.parametrize("width", [40, 60, 79])
def test_a_narrow_terminal_keeps_the_numbers(width: int) -> None:
    text = lines(top(), width)
    assert max(map(len, text)) <= width
    assert "SESSION" not in text[1]
    assert "7.0" in text[2]
    assert text[5].split()[-3:] == ["0", "50%", "3.0Gi"]


def test_many_ranks_fit_the_screen_and_the_busiest_come_first_on_request() -> None:
    usage = Usage([process(rank, cpu=float(rank), memory=rank) for rank in range(1024)])
    shown = compare(status(None), status(None), 1.0, usage)
    text = lines(shown, 100, height=24, order="cpu")
    assert len(text) <= 24
    assert "1023%" in text[5]
    assert text[-1].strip() == "… and 1,008 more ranks"
    assert lines(shown, 100, height=24)[5].split()[2] == "0"
    assert len(lines(shown, 100)) > 1024
