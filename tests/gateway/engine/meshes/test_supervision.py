"""Deaths of ranks: when the client gets a report, and with whose reason."""

from __future__ import annotations

from meshgate_gateway.engine.meshes.supervision import (
    HOST_REASON_TIMEOUT,
    MAX_UNCLAIMED,
    REASON_TIMEOUT,
    Supervision,
)
from meshgate_gateway.engine.monarch.interface import Fault
from meshgate_gateway.engine.objects.records import ActorMesh
from meshgate_gateway.engine.objects.table import ObjectTable
from meshgate_wire.messages import Fault as FaultMessage
from tests.gateway.engine.fakes import Sent, Timers, actor_mesh, proc_mesh

PROCS, ACTORS = 2, 3


class Supervised:
    """Four processes on two hosts, with actors on them unless ``actors`` is false."""

    def __init__(self, *, actors: bool = True) -> None:
        self.objects, self.sent, self.timers = ObjectTable(), Sent(), Timers()
        self.host_reasons: dict[str, str] = {}
        self.ranks_died: list[ActorMesh] = []
        self.processes_died: list[tuple[int, int, str]] = []
        self.supervision = Supervision(
            self.objects,
            self.sent,
            self.timers,
            host_reasons=self.host_reasons,
            ranks_died=self.ranks_died.append,
            process_died=lambda mesh, rank, report: self.processes_died.append((mesh, rank, report)),
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


# --- connections of processes that close


def test_a_death_without_a_reason_is_reported_after_the_reason_timeout() -> None:
    supervised = Supervised()
    supervised.supervision.process_ended(PROCS, 2, 12)
    report = "process 12 of rank 2 on workers-1 ended"
    assert supervised.processes_died == [(PROCS, 2, report)]
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


def test_a_host_that_returns_meanwhile_is_not_lost() -> None:
    supervised = Supervised()
    supervised.host_reasons["workers-1"] = "it restarts"
    supervised.supervision.host_lost("workers-1")
    del supervised.host_reasons["workers-1"]
    supervised.timers.fire(REASON_TIMEOUT)
    assert supervised.reports == []
