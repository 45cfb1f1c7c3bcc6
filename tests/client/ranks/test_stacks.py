"""How stacks are grouped and shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from meshgate.errors import GatewayLostError, StepFailedError
from meshgate.ranks import OWN_MESHES
from meshgate.ranks import stacks as module
from meshgate.ranks.stacks import Frame, ProcessStacks, Stacks, Thread, _process, places_text, read_stacks
from meshgate.session.futures import FutureProxy

CLIENT = Path(module.__file__).parents[1]
MONARCH = Frame("/env/lib/python3.11/site-packages/monarch/_src/actor/actor_mesh.py", 10, "handle_sync")
LIBRARY = Frame("/usr/lib/python3.11/threading.py", 11, "run")
STEP = Frame("/work/train.py", 12, "Trainer.step", "loss.backward()")
DEEPER = Frame("/usr/lib/python3.11/re/__init__.py", 13, "match")
TORCH = Frame("/env/lib/python3.11/site-packages/torch/x.py", 14, "backward")


def process(rank: int, *frames: Frame, mesh: str = "procs", **facts: Any) -> ProcessStacks:
    threads = (Thread("MainThread", (LIBRARY, DEEPER)), Thread("actor", (LIBRARY, MONARCH, *frames)))
    return ProcessStacks("workers-0", mesh, rank, 100 + rank, threads, **facts)


def test_the_frames_of_users_begin_below_those_of_monarch_and_the_library() -> None:
    thread = Thread("actor", (LIBRARY, MONARCH, STEP, TORCH, DEEPER, MONARCH))
    assert thread.user_frames == (STEP, TORCH, DEEPER)
    assert process(0, STEP).busy == (process(0, STEP).threads[1],)
    assert process(0).busy == ()


def test_equal_stacks_of_many_ranks_are_shown_once_and_the_most_common_first() -> None:
    other = Frame("/work/train.py", 30, "Trainer.save")
    found = Stacks((process(0, other), *(process(rank, STEP) for rank in (1, 2, 3, 7))))
    assert str(found) == (
        "procs ranks 1-3, 7 (4 processes):\n"
        '  File "/work/train.py", line 12, in Trainer.step\n    loss.backward()\n\n'
        'procs rank 0 on workers-0:\n  File "/work/train.py", line 30, in Trainer.save'
    )
    assert repr(found) == str(found)
    assert [each.rank for each in found] == [0, 1, 2, 3, 7]
    assert len(found) == 5


def test_idle_processes_problems_and_notes_are_shown() -> None:
    found = Stacks(
        (process(0), ProcessStacks("h", "procs", 1, 7, problem="it has ended"), process(2, STEP, note="by a signal")),
        {"lost": "its hosts are gone"},
    )
    text = str(found)
    assert "procs rank 0 on workers-0:\n  idle: waits for calls" in text
    assert "procs rank 1 on h:\n  it has ended" in text
    assert "  (by a signal)" in text
    assert text.endswith("lost: its hosts are gone")
    assert str(Stacks(())) == "no processes"


def test_all_threads_are_shown_on_request() -> None:
    (text,) = Stacks((process(0, STEP),)).groups(all_threads=True)
    assert "thread MainThread" in text
    assert "thread actor" in text


MODULE = Frame("/work/train.py", 24, "<module>")
LOAD = Frame("/work/train.py", 12, "load")
WRAPPER = Frame("/env/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", 81, "wrapper")
ALL_REDUCE = Frame("/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 2810, "all_reduce")
RUNS = Frame("<meshgate_jobs_spmd_rank_actors_0123456789abcdef>", 9, "RankRunner.run")


def script(rank: int, *frames: Frame, **facts: Any) -> ProcessStacks:
    """As ``faulthandler`` lists the threads: the main thread last."""
    threads = (Thread("thread 0x2", (LIBRARY,)), Thread("thread 0x1", frames))
    return ProcessStacks("workers-0", "spmd", rank, 100 + rank, threads, script=True, **facts)


@pytest.mark.parametrize(
    ("frames", "place"),
    [
        ((MODULE, WRAPPER, ALL_REDUCE), "all_reduce (train.py:24)"),
        ((MODULE, LOAD), "load (train.py:12)"),
        ((MODULE, LOAD, LIBRARY), "run (train.py:12)"),
        ((MODULE, LOAD, LIBRARY._replace(function="_accept")), "load (train.py:12)"),
        ((MODULE, LOAD, WRAPPER, STEP), "Trainer.step (train.py:12)"),
        ((Frame("<frozen runpy>", 88, "_run_code"), MODULE, ALL_REDUCE), "all_reduce (train.py:24)"),
        ((LIBRARY, DEEPER), "code that is not the script's"),
    ],
)
def test_the_place_of_a_script_is_what_its_code_called_and_where(frames: tuple[Frame, ...], place: str) -> None:
    assert script(0, *frames).place == place


def test_ranks_of_a_script_are_named_by_place_and_the_most_common_first() -> None:
    reduces = [script(rank, MODULE, WRAPPER, ALL_REDUCE) for rank in (0, 2, 3)]
    loads = [script(rank, MODULE, LOAD) for rank in (1, 5, 6)]
    assert (
        places_text([loads[0], *reduces], 4)
        == "3 of 4 ranks are in all_reduce (train.py:24), rank 1 is in load (train.py:12)"
    )
    assert places_text(reduces, 3) == "all 3 ranks are in all_reduce (train.py:24)"
    assert places_text(loads[:1], 4) == "rank 1 is in load (train.py:12)"
    assert places_text([*reduces, *loads[1:]], 7).endswith("ranks 5-6 are in load (train.py:12)")
    assert places_text([script(4, problem="it is stopped")], 7) == "rank 4 is in an unknown place: it is stopped"
    assert places_text([], 4) == ""


def test_a_script_that_runs_only_library_code_shows_it() -> None:
    assert 'threading.py", line 11, in run' in script(0, LIBRARY).text()


def test_a_script_that_is_not_python_is_not_called_idle() -> None:
    assert "runs a script whose stack cannot be read" in process(0, RUNS).text()


class Hosts:
    """Each host is asked by itself, and has an answer, or none in time."""

    def __init__(self, *answers: list[dict[str, Any]] | Exception | None) -> None:
        self.answers, self.stopped, self.asked = answers, 0, 0

    def __len__(self) -> int:
        return len(self.answers)

    def slice(self, hosts: slice) -> Hosts:
        self.asked = hosts.start
        return self

    def spawn_procs(self, name: str) -> Hosts:
        return self

    def spawn(self, name: str, Class: type) -> Hosts:
        return self

    read = property(lambda self: self)

    def call_one(self, timeout: float) -> FutureProxy[Any]:
        answer = self.answers[self.asked]
        if answer is None:
            return FutureProxy()
        return FutureProxy.failed(answer) if isinstance(answer, Exception) else FutureProxy.resolved(answer)

    def stop(self) -> None:
        self.stopped += 1


def answer(rank: int, mesh: str = "procs") -> dict[str, Any]:
    frames = [tuple(STEP)]
    found = {"host": "h", "session": "s", "mesh": mesh, "rank": rank, "pid": rank}
    return {**found, "threads": [{"name": "t", "frames": frames}]}


def test_each_host_is_asked_and_those_that_fail_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshgate.ranks.HOSTS_TIMEOUT", 0.1)
    good = Hosts([answer(1), answer(0), answer(0, "meshgate_stacks"), answer(0, "stacks")], [answer(2)])
    depends = StepFailedError("read could not run because an earlier step failed: spawn_procs()\nworkers-2 is lost")
    bad = Hosts(GatewayLostError("gone"), [answer(3)], depends, GatewayLostError("gone"), None)
    meshes: Any = {"good": good, "bad": bad}
    found = read_stacks(meshes)
    assert [(each.mesh, each.rank) for each in found] == [*(("procs", rank) for rank in range(4)), ("stacks", 0)]
    late = found.problems.pop("bad-4")
    assert found.problems == {"bad-0": "gone", "bad-2": "workers-2 is lost", "bad-3": "gone"}
    assert late
    assert found.texts()[-2:] == ["bad-0, bad-3: gone", "bad-2: workers-2 is lost"]
    assert (good.stopped, bad.stopped) == (2, 5)
    assert [each.rank for each in read_stacks({"good": good}, 2)] == [2]  # type: ignore[dict-item]
    assert [each.rank for each in read_stacks({"good": good}, [0, 1])] == [0, 1, 0]  # type: ignore[dict-item]


def test_equal_stacks_in_synced_code_of_several_hosts_are_shown_once() -> None:
    def synced(rank: int, home: str) -> dict[str, Any]:
        step = (f"{home}/snapshots/{'0' * 64}/models/train.py", *STEP[1:])
        return {**answer(rank), "host": home, "threads": [{"name": "t", "frames": [tuple(MONARCH), step]}]}

    hosts: Any = Hosts(*([synced(rank, f"/tmp/meshgate-{rank}")] for rank in range(2)))
    assert str(read_stacks({"hosts": hosts})) == (
        'procs ranks 0-1 (2 processes):\n  File "models/train.py", line 12, in Trainer.step\n    loss.backward()'
    )


def test_a_script_stands_for_the_actor_that_has_started_it() -> None:
    answers = [answer(0), {**answer(0), "pid": 7, "script": True}, answer(1), {**answer(0), "session": "t"}]
    meshes: Any = {"hosts": Hosts(answers)}
    found = read_stacks(meshes)
    assert [(each.session, each.rank, each.pid) for each in found] == [("t", 0, 0), ("s", 0, 7), ("s", 1, 1)]
    assert [each.script for each in found] == [False, True, False]


def test_a_rank_that_no_process_has_is_an_error_that_names_those_there_are() -> None:
    meshes: Any = {"good": Hosts([answer(0), answer(1), answer(9, "meshgate_stacks"), answer(0, "other")])}
    message = r"no process of this job has ranks 7, 9: procs has ranks 0-1, other has rank 0$"
    with pytest.raises(ValueError, match=message):
        read_stacks(meshes, [0, 7, 9])
    with pytest.raises(ValueError, match="has rank 7: it has none"):
        read_stacks({}, 7)
    meshes["bad"] = Hosts(GatewayLostError("gone"))  # it may have the rank
    assert len(read_stacks(meshes, 7)) == 0


def test_tasks_are_threads_that_are_suspended() -> None:
    found = _process({**answer(0), "tasks": [{"name": "Task-1", "frames": [tuple(STEP)]}]})
    assert [(thread.name, thread.task) for thread in found.threads] == [("t", False), ("Task-1", True)]
    assert str(found.threads[1]).startswith("task Task-1\n")
    assert module.ANSWER_TIMEOUT > 0
    with pytest.raises(KeyError):
        _process({})


def test_views_leave_out_each_mesh_that_meshgate_spawns() -> None:
    sources = "".join(path.read_text() for path in CLIENT.rglob("*.py"))
    spawned = re.findall(r'(?:spawn_procs\(name=|spawn_(?:streams|alone)\(.*)"(\w+)"', sources)
    assert set(spawned) == OWN_MESHES
