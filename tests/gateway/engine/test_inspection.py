"""What an engine reports about its session."""

from __future__ import annotations

import json
import time

import pytest

from meshgate_gateway.control import Inspect
from meshgate_gateway.engine import inspection as module
from meshgate_gateway.engine.inspection import PrintedLines
from meshgate_gateway.engine.objects.records import AVAILABLE, ActorMesh, Deaths, HostMesh, ProcMesh, Timeline
from meshgate_wire.messages import Call, Detach, Done, MeshRef, OutputLine, Region, Stop, Values
from meshgate_wire.status import CallCounts, EngineStatus, RankReply, Straggler
from tests.gateway.engine.fakes import host_mesh
from tests.gateway.engine.in_memory import EngineClient


def lines(*texts: str) -> list[OutputLine]:
    return [OutputLine(stream="stdout", mesh="m", ranks=(0,), text=text) for text in texts]


async def test_the_status_has_meshes_hosts_and_the_oldest_calls_first() -> None:
    client = EngineClient()
    actors = client.spawn_all(gpus=2)
    for number in (1, 2):
        call = Call(call=number, target=MeshRef(object=actors), endpoint=f"step{number}", adverb="call")
        client.send(call, b"arguments", stream=actors)
    await client.until(lambda: len(client.monarch.casts) == 2)
    for rank in (0, 1, 3):
        client.monarch.ports[0].put(b"value", rank)
    await client.until(lambda: client.engine.inspection.status().calls[0].answered == 3)
    assert [each.mesh_number for each in client.engine.inspection.status().calls] == [actors, actors]
    (hosts,) = [each for each in client.engine._objects.values() if isinstance(each, HostMesh)]
    hosts.missing["workers-1"] = AVAILABLE.lost("OOMKilled", returns=False)
    client.engine.host_ending("workers-0", "its pod is being deleted", 30.0)
    status = client.engine.inspection.status()
    assert [(mesh.kind, mesh.sizes) for mesh in status.meshes] == [
        ("procs", {"hosts": 2, "gpus": 2}),
        ("actors", {"hosts": 2, "gpus": 2}),
    ]
    procs, actors_mesh = status.meshes
    assert procs.hosts == ("workers-0", "workers-1")
    assert (actors_mesh.number, actors_mesh.procs) == (actors, procs.number)
    assert procs.calls is None
    assert actors_mesh.calls == CallCounts(in_flight=2)
    assert actors_mesh.endpoints == {"step1": CallCounts(in_flight=1), "step2": CallCounts(in_flight=1)}
    assert [(host.name, host.state) for host in status.hosts] == [("workers-0", "ready"), ("workers-1", "missing")]
    assert "OOMKilled" in status.hosts[1].reason
    assert status.hosts[0].reason == "its pod is being deleted"
    assert 0 <= (status.hosts[0].seconds_left or -1) <= 30
    assert status.hosts[1].seconds_left is None
    first, second = status.calls
    assert (first.mesh, first.endpoint, first.total, first.answered) == ("actors", "step1", 4, 3)
    assert first.waiting == {2: "workers-1"}
    assert second.waiting == {0: "workers-0", 1: "workers-0", 2: "workers-1", 3: "workers-1"}
    assert 0 <= second.age <= first.age
    client.monarch.ports[0].put(b"value", 2)
    await client.until(lambda: client.of(Values))
    assert client.engine.inspection.status().calls_in_flight == 1
    for rank in range(4):
        client.monarch.ports[1].put(b"value", rank)
    await client.until(lambda: len(client.of(Values)) == 2)
    counts = client.engine.inspection.status().meshes[1].calls
    assert counts is not None
    assert (counts.ended, counts.failed, counts.in_flight) == (2, 0, 0)
    by_endpoint = client.engine.inspection.status().meshes[1].endpoints
    assert {name: counts.ended for name, counts in by_endpoint.items()} == {"step1": 1, "step2": 1}
    assert sum(each.seconds for each in by_endpoint.values()) == pytest.approx(counts.seconds)
    assert 0 < counts.seconds < 60
    await client.end()


async def test_the_status_has_the_present_hosts_of_a_mesh_that_was_scaled() -> None:
    client = EngineClient()
    client.spawn_all()
    await client.until(lambda: len(client.engine.inspection.status().hosts) == 2)
    client.engine._objects.add(99, host_mesh(3))
    assert [host.name for host in client.engine.inspection.status().hosts] == [f"workers-{rank}" for rank in range(3)]
    await client.end()


async def test_a_detached_session_has_its_name() -> None:
    client = EngineClient()
    assert client.engine.inspection.status().name == ""
    client.send(Detach(call=1, name="train"), stream=0)
    await client.until(lambda: client.of(Done))
    assert client.engine.inspection.status().name == "train"
    await client.end()


async def test_the_ranks_that_others_have_waited_for_are_named() -> None:
    client = EngineClient()
    actors = client.spawn_all(gpus=8)
    client.send(Call(call=1, target=MeshRef(object=actors), endpoint="step", adverb="call"), b"", stream=actors)
    await client.until(lambda: client.monarch.casts)
    (mesh,) = [each for each in client.engine._objects.values() if isinstance(each, ActorMesh)]

    def counts() -> CallCounts:
        (status,) = [each for each in client.engine.inspection.status().meshes if each.kind == "actors"]
        assert status.calls is not None
        return status.calls

    step, evaluate = mesh.totals_of("step"), mesh.totals_of("evaluate")
    step.last_ranks.extend([(1, 0.5), (9, 2.0), (1, 0.25), (3, 0.0)])
    assert counts().compared == 4
    assert counts().stragglers == (
        Straggler(rank=9, host="workers-1", calls=1, seconds=2.0),
        Straggler(rank=1, host="workers-0", calls=2, seconds=0.75),
    )
    evaluate.last_ranks.extend((rank, 1.0 + rank) for rank in range(10))
    assert counts().compared == 14
    assert [each.rank for each in counts().stragglers] == [9, 8, 7, 6, 5, 4, 3, 2]
    assert counts().stragglers[0] == Straggler(rank=9, host="workers-1", calls=2, seconds=12.0)
    evaluate.last_ranks.clear()
    step.last_ranks.extend([(0, 0.0)] * 200)
    assert (counts().compared, counts().stragglers) == (100, ())
    for rank in range(16):
        client.monarch.ports[0].put(b"value", rank)
    await client.until(lambda: client.of(Values))
    await client.end()


def ended(client: EngineClient, kind: str = "procs") -> list[tuple[tuple[tuple[int, int], ...], str, int | None]]:
    """The ranks of the mesh that were lost, their reason and exit code."""
    (mesh,) = [each for each in client.engine.inspection.status().meshes if each.kind == kind]
    return [(each.ranks, each.reason, each.exit_code) for each in mesh.ended if not each.stopped]


async def spawned(client: EngineClient, gpus: int) -> tuple[ProcMesh, ActorMesh]:
    client.spawn_all(gpus=gpus)
    await client.until(lambda: any(isinstance(each, ActorMesh) for each in client.engine._objects.values()))
    (procs,) = [each for each in client.engine._objects.values() if isinstance(each, ProcMesh)]
    (actors,) = [each for each in client.engine._objects.values() if isinstance(each, ActorMesh)]
    return procs, actors


async def test_ranks_that_ended_are_grouped_by_their_reason() -> None:
    client = EngineClient()
    procs, actors = await spawned(client, gpus=512)
    assert ended(client) == []
    for rank in range(1024):
        procs.dead[rank] = f"process {100 + rank} of rank {rank} on workers-0 ended"
    unknown = "its process ended (exit code unknown)"
    assert ended(client) == [(((0, 1023),), unknown, None)]
    for rank, code in {3: -9, 5: -9, 6: -9, 7: -60, 9: 7}.items():
        procs.dead.exited([rank], code)
    procs.dead[1000], procs.dead[1001] = "its host workers-1 is lost", "its host workers-2 is lost"
    procs.dead[1003] = "its host workers-2 is lost"
    for rank, host_reason in {1000: "drained", 1001: "drained", 5: "OOMKilled", 8: "OOMKilled"}.items():
        procs.dead.explain(rank, host_reason)
    expected = [
        (((0, 2), (4, 4), (10, 999), (1002, 1002), (1004, 1023)), unknown, None),
        (((3, 3), (6, 6)), "killed by SIGKILL (out of memory?)", -9),
        (((1000, 1001),), "its host is lost: drained", None),
        (((5, 5),), "killed by SIGKILL; its host: OOMKilled", -9),
        (((7, 7),), "killed by signal 60", -60),
        (((8, 8),), f"{unknown}; its host: OOMKilled", None),
        (((9, 9),), "exited with code 7", 7),
        (((1003, 1003),), "its host is lost", None),
    ]
    assert ended(client) == expected
    actors.dead.update(dict.fromkeys(procs.dead, "its process failed"))
    assert ended(client, "actors") == expected
    await client.end()


async def test_actors_end_without_their_processes_or_because_they_are_stopped() -> None:
    client = EngineClient()
    procs, actors = await spawned(client, gpus=64)
    actors.dead[2] = "The actor a has failed:\n  aborted:\n    def f()\n  ValueError: not\x0bnow\n"
    actors.dead[4] = "The actor inner has failed:\n  its process failed"
    actors.dead.update(dict.fromkeys(range(6, 8), "mesh 'actors' was stopped: enough"), stopped=True)
    procs.dead.exited([2, 6], 1)
    assert ended(client, "actors") == [
        (((2, 2),), "ValueError: not now", None),
        (((4, 4),), "The actor inner has failed: its process failed", None),
    ]
    (status,) = [each for each in client.engine.inspection.status().meshes if each.kind == "actors"]
    assert [(each.ranks, each.reason) for each in status.ended if each.stopped] == [
        (((6, 7),), "stopped by the program")
    ]
    procs.dead[2] = procs.dead[6] = "process 1 of rank 2 on workers-0 ended"
    assert (((2, 2),), "exited with code 1", 1) in ended(client, "actors")
    assert len(ended(client, "actors")) == 2  # those that were stopped stay stopped
    actors.dead.update({rank: f"reason {rank}" for rank in range(8, 64)})
    groups = ended(client, "actors")
    assert (len(groups), groups[-1]) == (31, (((36, 63),), "28 other reasons", None))
    actors.dead.update(dict.fromkeys(range(8, 20), "the same reason"))
    (status,) = [each for each in client.engine.inspection.status().meshes if each.kind == "actors"]
    assert [each.stopped for each in status.ended] == [True] + [False] * 31  # never among the others
    assert ended(client) == [(((2, 2), (6, 6)), "exited with code 1", 1)]
    await client.end()


async def test_actors_of_stopped_processes_are_not_lost() -> None:
    client = EngineClient()
    procs, actors = await spawned(client, gpus=4)
    procs.dead[2] = "it was killed"
    procs.dead.update(dict.fromkeys((0, 1), "mesh 'procs' was stopped: enough"), stopped=True)
    actors.dead[3] = "ValueError: no"
    procs.dead.update({3: "mesh 'procs' was stopped: enough"}, stopped=True)
    actors.dead.add_from(procs.dead, range(3))  # as those do that are spawned there now
    killed = (((2, 2),), "it was killed", None)
    assert ended(client) == [killed]
    assert ended(client, "actors") == [(((3, 3),), "ValueError: no", None), killed]
    await client.end()


async def test_an_actor_that_is_known_to_have_ended_before_its_process_has_the_exit_code() -> None:
    client = EngineClient()
    procs, actors = await spawned(client, gpus=64)
    for rank in range(64):
        why = "failed: Killed(sig=9)" if rank < 40 else "failed: Timeout"
        actors.dead[rank] = f"The actor <root>.<a.A actors{{'hosts': 0/2, 'gpus': {rank}/64}}> and all its descendants "
        actors.dead[rank] += f"have failed:\n  the process this actor was running on {why}"
    procs.dead.exited(range(40), -9)
    failed = "The actor <root>.<a.A actors> and all its descendants have failed: the process this actor was running on "
    assert ended(client, "actors") == [
        (((0, 39),), "killed by SIGKILL (out of memory?)", -9),
        (((40, 63),), f"{failed}failed: Timeout", None),
    ]
    await client.end()


async def test_ranks_are_grouped_again_only_if_something_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    client = EngineClient()
    procs, _ = await spawned(client, gpus=4)
    grouped: list[object] = []
    group = module._grouped
    monkeypatch.setattr(module, "_grouped", lambda mesh: grouped.append(mesh) or group(mesh))
    changes = (
        lambda: procs.dead.update({1: "killed", 2: "killed"}),
        lambda: procs.dead.exited([1], 7),
        lambda: procs.dead.explain(1, "drained"),
        lambda: procs.dead.pop(1),
    )
    for change in changes:
        ended(client)
        grouped.clear()
        ended(client)
        assert grouped == []
        change()
        ended(client)
        assert len(grouped) == 2  # the processes, and the actors on them
    await client.end()


def test_calls_read_the_ranks_that_ended_without_python_code() -> None:
    for reads in ("__len__", "__contains__", "__getitem__", "__iter__", "get", "keys", "items", "values"):
        assert getattr(Deaths, reads) is getattr(dict, reads)


async def test_the_times_of_the_first_and_the_last_end_are_known() -> None:
    client = EngineClient()
    client.spawn_all(gpus=2)
    await client.until(lambda: any(isinstance(each, ProcMesh) for each in client.engine._objects.values()))
    (procs,) = [each for each in client.engine._objects.values() if isinstance(each, ProcMesh)]
    procs.dead.update(dict.fromkeys((0, 1, 2), "it is gone"))
    procs.dead.times |= {0: time.monotonic() - 100, 1: time.monotonic() - 500}
    procs.dead[1] = "it is gone"  # for a second time
    assert procs.dead.pop(2) == "it is gone"
    assert procs.dead.times.keys() == {0, 1}
    (mesh,) = [each for each in client.engine.inspection.status().meshes if each.kind == "procs"]
    (group,) = mesh.ended
    assert group.age is not None
    assert group.last_age is not None
    assert 500 <= group.age < 600
    assert group.age - group.last_age == pytest.approx(400, abs=1)
    await client.end()


async def test_timelines_have_hosts_and_seconds_those_in_flight_first_and_then_the_last() -> None:
    client = EngineClient()
    actors = client.spawn_all(gpus=2)
    client.send(Call(call=1, target=MeshRef(object=actors), endpoint="step", adverb="call"), b"", stream=actors)
    await client.until(lambda: client.monarch.casts)
    (mesh,) = [each for each in client.engine._objects.values() if isinstance(each, ActorMesh)]
    client.monarch.ports[0].put(b"value", 3)
    await client.until(lambda: client.engine.inspection.status().calls[0].answered == 1)
    (running,) = client.engine.inspection.status().timelines
    assert (running.mesh, running.endpoint, running.call, running.seconds) == ("actors", "step", 1, None)
    assert (running.total, running.answered, running.half, running.straggler) == (4, 1, None, None)
    assert running.missing == {0: "workers-0", 1: "workers-0", 2: "workers-1"}
    assert [(each.rank, each.host, each.raised) for each in running.replies] == [(3, "workers-1", False)]
    assert running.first == running.replies[0].seconds
    assert 0 <= running.replies[0].seconds <= running.age + 0.001  # which is rounded

    def has_ended(call: int, started: float, late: float) -> Timeline:
        return Timeline(
            call=call,
            endpoint="step",
            ranks=(3, 1, 0),
            started=started,
            ended=started + 3.5,
            failed=True,
            cancelled=False,
            answered=4,
            first=started + 1.0,
            half=started + 2.0,
            last=((9, started + 3.1), (0, started + 3.0), (1, started + 2.0)),  # the first is a rank not called
            raised=((2, started + 1.0), (1, started + 2.0)),
            missing=(),
            compared=(3, late),
        )

    now = time.monotonic()
    mesh.totals_of("step").timelines.extend(has_ended(number, now - 100 + number, 0.0) for number in range(2, 20))
    mesh.totals_of("save").timelines.append(has_ended(20, now - 200, 1.0))
    mesh.totals_of("train").timelines.append(has_ended(21, now - 300, 0.0)._replace(ended=now))
    timelines = client.engine.inspection.status().timelines
    assert [each.call for each in timelines] == [1, 21, *range(19, 11, -1), 20]
    assert (timelines[1].straggler, timelines[-1].straggler) == (None, 3)
    assert timelines[-1].seconds == 3.5
    assert timelines[-1].age >= 200
    assert timelines[-1].replies == (
        RankReply(rank=3, host="workers-1", seconds=3.0),
        RankReply(rank=1, host="workers-0", seconds=2.0, raised=True),
        RankReply(rank=0, host="workers-0", seconds=1.0, raised=True),
    )
    for number in range(8):
        mesh.totals_of(f"other{number}").timelines.extend(has_ended(each, now + each, 0.0) for each in range(8))
    timelines = client.engine.inspection.status().timelines
    assert [each.call for each in timelines] == [1, *sorted([6, 7] * 8, reverse=True)]
    for rank in range(3):
        client.monarch.ports[0].put(b"value", rank)
    await client.until(lambda: client.of(Values))
    client.send(Stop(call=2, target=MeshRef(object=actors), reason="enough"), stream=actors)
    await client.until(lambda: client.of(Done))
    assert client.engine.inspection.status().timelines == ()
    await client.end()


async def test_a_large_answer_comes_in_parts() -> None:
    client = EngineClient()
    client.engine.inspection.output.add(lines(*("é" * 1000 for _ in range(100))))
    parts = list(client.engine.inspection.answer(Inspect(request=3, what="output", after=50)))
    assert [part.more for part in parts] == [True, False]
    assert all(len(part.model_dump_json().encode()) < 160_000 and part.request == 3 for part in parts)
    found = json.loads("".join(part.body for part in parts))
    assert [line["number"] for line in found["lines"]] == list(range(51, 101))
    client.engine._ledger.name = "x" * 400_000
    parts = list(client.engine.inspection.answer(Inspect(request=4, what="session")))
    assert len(parts) > 2
    assert json.loads("".join(part.body for part in parts))["name"] == client.engine.describe()["name"]
    client.engine._ledger.name = ""
    (status,) = client.engine.inspection.answer(Inspect(request=4, what="status"))
    assert EngineStatus.model_validate_json(status.body).meshes == ()
    await client.end()


def test_old_lines_are_dropped_and_counted() -> None:
    kept = PrintedLines()
    count = module.MAX_KEPT // (module.LINE_COST + 1) + 10
    kept.add(lines(*("x" for _ in range(count))))
    page = kept.after(5)
    assert page.last == count
    assert page.lines[0].number == page.dropped + 6
    assert page.dropped == 10 - 5
    assert kept.after(count).lines == ()


def test_lines_have_the_time_at_which_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = PrintedLines()
    for now in (100.0, 160.5):
        monkeypatch.setattr(module.time, "time", lambda now=now: now)
        kept.add(lines("a line"))
    page = kept.after(0)
    assert [line.time for line in page.lines] == [100.0, 160.5]
    assert page.now == 160.5


def test_a_page_has_a_limit_and_the_next_one_follows_it() -> None:
    kept = PrintedLines()
    kept.add(lines(*("x" * (module.MAX_PAGE // 4) for _ in range(5))))
    assert [line.number for line in kept.after(0).lines] == [1, 2, 3]
    assert [line.number for line in kept.after(3).lines] == [4, 5]


def test_sizes_are_by_dimension() -> None:
    region = Region(labels=("hosts", "gpus"), offset=0, sizes=(2, 4), strides=(4, 1))
    assert module._sizes(region) == {"hosts": 2, "gpus": 4}
