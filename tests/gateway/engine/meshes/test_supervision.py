"""Deaths of ranks: when the client gets a report, and with whose reason."""

from __future__ import annotations

import asyncio

from meshgate_gateway.engine.meshes.supervision import (
    HOST_REASON_TIMEOUT,
    MAX_UNCLAIMED,
    REASON_TIMEOUT,
    TERMINATED_TIMEOUT,
    Supervision,
    Watching,
)
from meshgate_gateway.engine.monarch.interface import Fault
from meshgate_gateway.engine.objects.records import ActorMesh, ProcMesh
from meshgate_gateway.engine.objects.regions import hosts_region
from meshgate_gateway.engine.objects.table import ObjectTable
from meshgate_wire.messages import Fault as FaultMessage
from tests.gateway.engine.fakes import (
    FakeMesh,
    FakeMonarch,
    Sent,
    Timers,
    actor_mesh,
    proc_mesh,
    start_task,
    turns,
)

PROCS, ACTORS = 2, 3
ADDRESS, SECRET = "unix:/run/workers", "secret"


class Supervised:
    """Four processes on two hosts, with actors on them unless ``actors`` is false."""

    def __init__(self, *, actors: bool = True) -> None:
        self.objects, self.sent, self.timers = ObjectTable(), Sent(), Timers()
        self.host_reasons: dict[str, str] = {}
        self.ranks_died: list[ActorMesh] = []
        self.processes_died: list[tuple[ProcMesh, int, str]] = []
        self.supervision = Supervision(
            self.objects,
            self.sent,
            self.timers,
            host_reasons=self.host_reasons,
            ranks_died=self.ranks_died.append,
            process_died=lambda procs, rank, report: self.processes_died.append((procs, rank, report)),
        )
        self.procs = proc_mesh(gpus=2)
        self.actors = actor_mesh(self.procs)
        self.objects.add(PROCS, self.procs)
        if actors:
            self.objects.add(ACTORS, self.actors)

    @property
    def reports(self) -> list[tuple[int, tuple[int, ...], str]]:
        return [(fault.object, fault.ranks, fault.report) for fault in self.sent.of(FaultMessage)]


# --- faults that Monarch reports


def test_a_fault_is_reported_once_with_the_hosts_of_its_ranks() -> None:
    supervised = Supervised()
    fault = Fault("actors-unique", (1, 2), "ranks 1 and 2 crashed")
    supervised.supervision.fault(fault)
    supervised.supervision.fault(fault)
    (reported,) = supervised.sent.of(FaultMessage)
    assert (reported.object, reported.ranks, reported.report) == (ACTORS, (1, 2), "ranks 1 and 2 crashed")
    assert reported.hosts == {1: "workers-0", 2: "workers-1"}
    assert supervised.actors.dead == {1: "ranks 1 and 2 crashed", 2: "ranks 1 and 2 crashed"}
    assert supervised.ranks_died == [supervised.actors]


def test_monarch_counts_the_ranks_of_actors_on_a_slice_from_its_first() -> None:
    supervised = Supervised()
    supervised.actors.region = supervised.procs.region.model_copy(update={"offset": 2, "sizes": (1, 2)})
    supervised.supervision.fault(Fault("actors-unique", (1,), "exit code 3"))
    (reported,) = supervised.sent.of(FaultMessage)
    assert (reported.ranks, reported.hosts) == ((3,), {3: "workers-1"})
    assert supervised.actors.dead == {3: "exit code 3"}


def test_calls_are_answered_before_the_fault_is_reported() -> None:
    supervised = Supervised()
    reports_before: list[int] = []
    supervised.supervision._ranks_died = lambda actors: reports_before.append(len(supervised.reports))
    supervised.supervision.fault(Fault("actors-unique", (1,), "crashed"))
    assert (reports_before, len(supervised.reports)) == ([0], 1)


def test_a_fault_without_ranks_is_of_the_whole_mesh() -> None:
    supervised = Supervised()
    supervised.supervision.fault(Fault("actors-unique", (), "crashed"))
    assert supervised.reports == [(ACTORS, (0, 1, 2, 3), "crashed")]


def test_a_fault_of_a_mesh_that_is_being_stopped_is_not_reported() -> None:
    supervised = Supervised()
    supervised.actors.stopping = True
    supervised.supervision.fault(Fault("actors-unique", (0,), "stopped"))
    assert supervised.reports == []


def test_a_fault_that_arrives_before_its_mesh_is_up_is_reported_once_it_is() -> None:
    supervised = Supervised()
    supervised.actors.unique_name = ""
    supervised.supervision.fault(Fault("actors-unique", (0,), "crashed early"))
    supervised.supervision.fault(Fault("others-unique", (0,), "of another mesh"))
    assert supervised.reports == []
    supervised.actors.unique_name = "actors-unique"
    supervised.supervision.actors_up(supervised.actors)
    supervised.supervision.actors_up(supervised.actors)
    assert supervised.reports == [(ACTORS, (0,), "crashed early")]


def test_only_the_latest_unclaimed_faults_are_kept() -> None:
    supervised = Supervised()
    supervised.actors.unique_name = ""
    for rank in range(2):
        supervised.supervision.fault(Fault("actors-unique", (rank,), f"rank {rank} crashed"))
    for _ in range(MAX_UNCLAIMED - 1):
        supervised.supervision.fault(Fault("others-unique", (0,), "crashed"))
    supervised.actors.unique_name = "actors-unique"
    supervised.supervision.actors_up(supervised.actors)
    assert supervised.reports == [(ACTORS, (1,), "rank 1 crashed")]


def test_what_the_actors_of_the_setup_found_is_known_by_host() -> None:
    supervised = Supervised()
    supervised.supervision.fault(Fault("log_level-unique", (0,), "crashed"))
    supervised.supervision.fault(Fault("setup-unique", (0,), "worker workers-1 has Python 3.99.1 and no more"))
    assert supervised.supervision.version_problem(["workers-0"]) == ""
    assert supervised.supervision.version_problem(["workers-0", "workers-1"]).startswith("worker workers-1 has Python")
    assert supervised.supervision.version_problem(["workers-1"]) == ""  # a later spawn there failed for another reason


# --- connections of processes that close


def test_a_death_without_a_reason_is_reported_after_the_reason_timeout() -> None:
    supervised = Supervised()
    supervised.supervision.process_ended(PROCS, 2, 12)
    report = "process 12 of rank 2 on workers-1 ended"
    assert supervised.processes_died == [(supervised.procs, 2, report)]
    assert supervised.reports == []
    supervised.timers.fire(REASON_TIMEOUT)
    assert supervised.reports == [(ACTORS, (2,), report)]


def test_monarchs_reason_is_reported_instead_of_the_closed_connection() -> None:
    supervised = Supervised()
    supervised.supervision.process_ended(PROCS, 2, 12)
    supervised.supervision.fault(Fault("actors-unique", (2,), "segmentation fault"))
    supervised.timers.fire(REASON_TIMEOUT)
    assert supervised.reports == [(ACTORS, (2,), "segmentation fault")]


def test_a_death_in_processes_without_actors_is_reported_for_the_processes() -> None:
    supervised = Supervised(actors=False)
    supervised.supervision.process_ended(PROCS, 2, 12)
    supervised.timers.fire(REASON_TIMEOUT)
    assert supervised.reports == [(PROCS, (2,), "process 12 of rank 2 on workers-1 ended")]


def test_processes_that_end_because_their_mesh_is_stopped_did_not_die() -> None:
    supervised = Supervised()
    supervised.supervision.process_ended(PROCS, 1, 11)
    supervised.procs.stopping = True
    supervised.supervision.process_ended(PROCS, 2, 12)
    supervised.timers.fire(REASON_TIMEOUT)
    assert supervised.reports == []
    assert supervised.procs.dead.keys() == {1}


def test_if_no_process_of_a_host_is_left_the_reports_wait_for_the_reason_of_the_host() -> None:
    supervised = Supervised()
    for rank in (2, 3):
        supervised.supervision.process_ended(PROCS, rank, 10 + rank)
    supervised.timers.fire(REASON_TIMEOUT)
    assert supervised.reports == []
    supervised.host_reasons["workers-1"] = "its pod ended: OOMKilled, exit code 137"
    supervised.supervision.report_unexplained("workers-1")
    reason = "(workers-1: its pod ended: OOMKilled, exit code 137)"
    assert supervised.reports == [
        (ACTORS, (2,), f"process 12 of rank 2 on workers-1 ended {reason}"),
        (ACTORS, (3,), f"process 13 of rank 3 on workers-1 ended {reason}"),
    ]
    supervised.timers.fire(HOST_REASON_TIMEOUT)
    assert len(supervised.reports) == 2


def test_what_is_known_of_an_end_besides_the_report_is_kept() -> None:
    supervised = Supervised()
    killed = "The actor <root>.<a.Actor actors> and all its descendants have failed:\n  the process this actor was "
    killed += "running on failed: Killed(sig=9)"
    supervised.supervision.process_ended(PROCS, 0, 10)
    supervised.supervision.fault(Fault("actors-unique", (0,), killed))
    assert supervised.procs.dead.exit_codes == {0: -9}
    supervised.supervision.process_ended(PROCS, 1, 11)
    supervised.timers.fire(REASON_TIMEOUT)
    supervised.timers.fire(HOST_REASON_TIMEOUT)
    supervised.supervision.fault(Fault("actors-unique", (1,), killed.replace("9", "15")))
    assert supervised.procs.dead.exit_codes == {0: -9, 1: -15}  # also if the report is too late for the client
    supervised.host_reasons["workers-1"] = "OOMKilled"
    supervised.supervision.process_ended(PROCS, 3, 13)
    supervised.timers.fire(REASON_TIMEOUT)
    assert supervised.procs.dead.host_reasons == supervised.actors.dead.host_reasons == {3: "OOMKilled"}
    supervised.supervision.fault(Fault("actors-unique", (), killed))
    assert supervised.procs.dead.exit_codes == {0: -9, 1: -15}  # Monarch does not say whose it is


def terminated() -> tuple[Supervised, Fault]:
    """All processes of a host have ended, and Monarch reports that SIGTERM did it."""
    supervised = Supervised()
    for rank in (2, 3):
        supervised.supervision.process_ended(PROCS, rank, 10 + rank)
    return supervised, Fault("actors-unique", (2, 3), "the process failed: Killed(sig=15)")


def test_a_host_whose_processes_were_all_terminated_is_given_time_to_say_why() -> None:
    supervised, fault = terminated()
    supervised.supervision.fault(fault)
    supervised.timers.fire(REASON_TIMEOUT)
    supervised.timers.fire(HOST_REASON_TIMEOUT)
    assert supervised.reports == []
    supervised.host_reasons["workers-1"] = "TIMEOUT: it reached its time limit"
    supervised.supervision.host_lost("workers-1")
    report = "the process failed: Killed(sig=15) (workers-1: TIMEOUT: it reached its time limit)"
    assert supervised.reports == [(ACTORS, (2, 3), report)]
    supervised.timers.fire(TERMINATED_TIMEOUT)
    supervised.timers.fire(REASON_TIMEOUT)
    assert len(supervised.reports) == 1


def test_a_host_that_does_not_say_why_its_processes_were_terminated_is_not_waited_for_longer() -> None:
    supervised, fault = terminated()
    supervised.supervision.fault(fault)
    for timeout in (REASON_TIMEOUT, HOST_REASON_TIMEOUT, TERMINATED_TIMEOUT):
        assert supervised.reports == []
        supervised.timers.fire(timeout)
    assert supervised.reports == [(ACTORS, (2, 3), "the process failed: Killed(sig=15)")]


def test_monarch_may_report_terminated_processes_before_their_connections_close() -> None:
    supervised = Supervised()
    supervised.supervision.fault(Fault("actors-unique", (2,), "the process failed: Killed(sig=15)"))
    for rank in (2, 3):
        supervised.supervision.process_ended(PROCS, rank, 10 + rank)
    supervised.timers.fire(REASON_TIMEOUT)
    supervised.timers.fire(HOST_REASON_TIMEOUT)
    assert supervised.reports == []
    supervised.host_reasons["workers-1"] = "TIMEOUT"
    supervised.supervision.host_lost("workers-1")
    reason = "process 13 of rank 3 on workers-1 ended (workers-1: TIMEOUT)"
    assert sorted(supervised.reports) == [
        (ACTORS, (2,), "the process failed: Killed(sig=15) (workers-1: TIMEOUT)"),
        (ACTORS, (3,), reason),
    ]


def test_the_host_has_as_long_if_monarch_says_late_that_its_processes_were_terminated() -> None:
    supervised, fault = terminated()
    supervised.timers.fire(REASON_TIMEOUT)
    supervised.supervision.fault(fault)
    supervised.timers.fire(HOST_REASON_TIMEOUT)
    assert supervised.reports == []
    supervised.timers.fire(TERMINATED_TIMEOUT)
    assert supervised.reports == [(ACTORS, (rank,), "the process failed: Killed(sig=15)") for rank in (2, 3)]


def test_a_process_that_was_terminated_beside_living_ones_waits_for_no_host() -> None:
    for ended in ((), (2,)):  # Monarch says so before or after its connection closed
        supervised = Supervised()
        for rank in ended:
            supervised.supervision.process_ended(PROCS, rank, 10 + rank)
        supervised.supervision.fault(Fault("actors-unique", (2,), "the process failed: Killed(sig=15)"))
        supervised.timers.fire(REASON_TIMEOUT)
        assert supervised.reports == [(ACTORS, (2,), "the process failed: Killed(sig=15)")]


def test_processes_that_ended_otherwise_or_on_a_lost_host_are_reported_at_once() -> None:
    supervised, fault = terminated()
    supervised.supervision.fault(Fault(fault.mesh, fault.ranks, "the process failed: Killed(sig=9)"))
    assert len(supervised.reports) == 1
    supervised, fault = terminated()
    supervised.host_reasons["workers-1"] = "gone"
    supervised.supervision.fault(fault)
    assert supervised.reports == [(ACTORS, (2, 3), "the process failed: Killed(sig=15) (workers-1: gone)")]


def test_if_the_host_has_no_reason_either_the_deaths_are_reported_without_one() -> None:
    supervised = Supervised()
    for rank in (2, 3):
        supervised.supervision.process_ended(PROCS, rank, 10 + rank)
    supervised.timers.fire(REASON_TIMEOUT)
    supervised.timers.fire(HOST_REASON_TIMEOUT)
    assert [ranks for _, ranks, _ in supervised.reports] == [(2,), (3,)]


def test_a_death_on_a_host_that_is_known_to_be_lost_waits_for_no_other_reason() -> None:
    supervised = Supervised()
    supervised.host_reasons["workers-1"] = "evicted"
    for rank in (2, 3):
        supervised.supervision.process_ended(PROCS, rank, rank)
    supervised.timers.fire(REASON_TIMEOUT)
    assert [report for _, _, report in supervised.reports] == [
        f"process {rank} of rank {rank} on workers-1 ended (workers-1: evicted)" for rank in (2, 3)
    ]


def test_the_reason_of_the_host_is_kept_although_the_program_stops_the_mesh_at_once() -> None:
    supervised = Supervised()
    supervised.host_reasons["workers-1"] = "evicted"
    supervised.supervision.process_ended(PROCS, 2, 12)
    supervised.procs.stopping = True
    supervised.timers.fire(REASON_TIMEOUT)
    assert supervised.procs.dead.host_reasons == {2: "evicted"}
    assert not supervised.reports


# --- hosts that are lost without a word


def test_the_processes_of_a_lost_host_are_dead_even_if_their_connections_stay_open() -> None:
    supervised = Supervised()
    supervised.host_reasons["workers-1"] = "it lost its power"
    supervised.supervision.host_lost("workers-1")
    assert supervised.reports == []
    supervised.timers.fire(REASON_TIMEOUT)
    report = "its host workers-1 is lost (workers-1: it lost its power)"
    assert supervised.reports == [(ACTORS, (2,), report), (ACTORS, (3,), report)]
    assert [rank for _, rank, _ in supervised.processes_died] == [2, 3]


def test_a_fault_says_whether_the_job_has_no_host_any_more() -> None:
    for lost in (False, True):
        supervised = Supervised()
        supervised.supervision.job_lost = lost
        supervised.supervision.fault(Fault("actors-unique", (1,), "Slurm ended the job"))
        assert [fault.job_lost for fault in supervised.sent.of(FaultMessage)] == [lost]


def test_a_host_that_returns_meanwhile_is_not_lost() -> None:
    supervised = Supervised()
    supervised.host_reasons["workers-1"] = "it restarts"
    supervised.supervision.host_lost("workers-1")
    del supervised.host_reasons["workers-1"]
    supervised.timers.fire(REASON_TIMEOUT)
    assert supervised.reports == []


class Watched:
    """A session that endpoints return meshes to: three processes, of which the first has base rank 2."""

    def __init__(self, *, hold: bool = False) -> None:
        self.monarch, self.objects = FakeMonarch(hold=hold), ObjectTable()
        self.address, self.secret = ADDRESS, SECRET
        self.died: list[ActorMesh] = []
        self.processes_died: list[tuple[ProcMesh, int, str]] = []
        self.processes_back: list[tuple[ProcMesh, int]] = []
        self.watching = Watching(
            self.objects,
            self.monarch,
            self,
            start_task=start_task,
            ranks_died=self.died.append,
            process_died=lambda procs, rank, report: self.processes_died.append((procs, rank, report)),
            process_back=lambda procs, rank: self.processes_back.append((procs, rank)),
        )

    def receive(self, number: int, name: str = "inner") -> tuple[ProcMesh, ActorMesh]:
        procs = ProcMesh(FakeMesh(name), "", hosts_region(3, offset=2), ())
        actors = actor_mesh(procs, f"actors of {number}")
        self.objects.add(number, actors)
        self.watching.watch(number, procs)
        return procs, actors

    @property
    def watchers(self) -> list[FakeMesh]:
        return [mesh for mesh in self.monarch.meshes if mesh.name == "ProcessWatcher"]


async def test_the_end_of_a_process_fails_the_ranks_of_every_actor_mesh_on_it() -> None:
    watched = Watched()
    procs, actors = watched.receive(-1)
    await turns()
    assert not watched.watching.process_ended(-9, 0, 70)
    assert watched.watching.process_ended(-1, 1, 71)
    assert actors.dead == procs.dead == {3: "process 71 of rank 3 of a mesh that an endpoint returned ended"}
    assert watched.died == [actors]
    assert watched.watching.process_ended(-1, 1, 71)
    assert watched.died == [actors]


async def test_processes_that_are_returned_again_are_watched_once_and_known_to_be_dead() -> None:
    watched = Watched()
    first, _ = watched.receive(-1)
    watched.watching.watch(-1, first)
    _, second = watched.receive(-3)
    watched.receive(-5, name="others")
    await turns()
    assert len(watched.watchers) == 2
    watched.watching.process_ended(-1, 0, 70)
    assert set(second.dead) == {2}
    report = "process 70 of rank 2 of a mesh that an endpoint returned ended"
    assert watched.processes_died == [(first, 2, report), (second.procs, 2, report)]
    third, _ = watched.receive(-7)
    assert set(third.dead) == {2}


async def test_processes_that_do_not_answer_the_watchers_are_dead() -> None:
    watched = Watched(hold=True)
    _, actors = watched.receive(-1)
    await turns()
    watched.watching.connected(-1, 1)
    ready = watched.watchers[0].ready
    assert isinstance(ready, asyncio.Future)
    ready.set_exception(RuntimeError("error spawning actor mesh: Timeout(30s)=0..2"))
    await turns()
    assert set(actors.dead) == {2, 4}
    assert "does not answer: error spawning" in actors.dead[2]


async def test_a_process_that_runs_is_alive_before_its_watcher_connects() -> None:
    watched = Watched(hold=True)
    _, actors = watched.receive(-1)
    await turns()
    ready = watched.watchers[0].ready
    assert ready is not None
    ready.set_exception(RuntimeError("error spawning actor mesh: statuses: Timeout(30s)=1..2;Running=0..1,2..3"))
    await turns()
    assert set(actors.dead) == {3}


async def test_a_process_that_connects_after_all_is_alive() -> None:
    watched = Watched(hold=True)
    procs, actors = watched.receive(-1)
    await turns()
    ready = watched.watchers[0].ready
    assert ready is not None
    ready.set_exception(RuntimeError("error spawning actor mesh: statuses: Timeout(30s)=0..3"))
    await turns()
    watched.watching.connected(-1, 1)
    assert set(actors.dead) == set(procs.dead) == set(watched.receive(-3)[0].dead) == {2, 4}
    assert watched.processes_back == [(procs, 3)]
    watched.watching.process_ended(-1, 1, 71)
    watched.watching.connected(-1, 1)
    watched.watching.connected(-1, 3)
    assert set(actors.dead) == set(procs.dead) == {2, 3, 4}


async def test_processes_that_the_session_spawned_itself_need_no_watchers() -> None:
    watched = Watched()
    watched.watching.watch(1, proc_mesh())
    await turns()
    assert watched.watchers == []


def up(watched: Watched, number: int, name: str = "owners") -> ProcMesh:
    """Four processes that the session has spawned."""
    procs = proc_mesh(name=name, gpus=2)
    procs.up = asyncio.get_running_loop().create_future()
    procs.up.set_result(None)
    watched.objects.add(number, procs)
    return procs


async def test_processes_that_the_session_spawned_are_known_to_end_without_watchers() -> None:
    watched = Watched()
    up(watched, 1, "others")
    up(watched, 2)
    watched.monarch.processes["inner"] = ("owners-1", "owners-2", "owners-3")
    _, actors = watched.receive(-1)
    await turns()
    assert watched.watchers == []
    assert not watched.watching.process_ended(1, 2, 70)
    assert not watched.watching.process_ended(2, 0, 70)
    assert actors.dead == {}
    assert not watched.watching.process_ended(2, 2, 71)
    assert actors.dead == {3: "process 71 of rank 3 of a mesh that an endpoint returned ended"}
    assert watched.died == [actors]


async def test_processes_of_the_session_that_are_dead_are_so_in_a_mesh_that_is_returned() -> None:
    watched = Watched()
    up(watched, 2).dead[3] = "process 73 of rank 3 on workers-1 ended"
    watched.monarch.processes["inner"] = ("owners-1", "owners-2", "owners-3")
    procs, _ = watched.receive(-1)
    assert procs.dead == {4: "process 73 of rank 3 on workers-1 ended"}


async def test_processes_of_a_returned_mesh_that_the_session_stops_are_stopped_there_too() -> None:
    watched = Watched()
    spawned = up(watched, 2)
    spawned.dead.update({3: "mesh 'owners' was stopped: enough"}, stopped=True)
    watched.monarch.processes["inner"] = ("owners-1", "owners-2", "owners-3")
    procs, actors = watched.receive(-1)
    assert (procs.dead.keys(), procs.dead.stopped) == ({4}, {4})
    watched.watching.process_ended(2, 1, 71)
    spawned.stopping = True
    watched.watching.process_ended(2, 2, 72)
    assert actors.dead.keys() == {2, 3}  # calls of them fail
    assert (procs.dead.stopped, actors.dead.stopped) == ({3, 4}, {3})
    again, _ = watched.receive(-2)
    assert (again.dead.keys(), again.dead.stopped) == ({2, 3, 4}, {3, 4})


async def test_processes_of_a_mesh_that_is_being_stopped_are_watched() -> None:
    """Monarch no longer names them."""
    watched = Watched()
    up(watched, 2).stopping = True
    watched.monarch.processes["inner"] = ("owners-1", "owners-2", "owners-3")
    watched.receive(-1)
    await turns()
    assert len(watched.watchers) == 1


async def test_a_mesh_with_other_processes_too_is_watched() -> None:
    watched = Watched()
    up(watched, 2)
    watched.monarch.processes["inner"] = ("owners-1", "owners-2", "another")
    _, actors = watched.receive(-1)
    await turns()
    assert len(watched.watchers) == 1
    watched.watching.process_ended(2, 1, 71)
    assert set(actors.dead) == {2}
