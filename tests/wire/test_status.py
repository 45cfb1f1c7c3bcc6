"""What a gateway says about its job, read by a client of another version."""

from __future__ import annotations

from meshgate_wire.status import EndedRanks, MeshStatus, RunStatus


def test_ranks_that_ended_are_those_of_all_sequences() -> None:
    assert list(EndedRanks(ranks=((3, 3), (5, 7)), reason="exited with code 1").each()) == [3, 5, 6, 7]


def test_a_newer_gateway_says_more_than_this_client_reads() -> None:
    ended = {"ranks": [[1, 1]], "reason": "gone", "later": 1}
    facts = {"kind": "procs", "name": "procs", "sizes": {"gpus": 8}, "ended": [ended], "later": 1}
    assert MeshStatus.model_validate(facts).ended == (EndedRanks(ranks=((1, 1),), reason="gone"),)


def test_runs_that_have_not_ended_are_live() -> None:
    run = {"name": "night", "command": (), "age": 1}
    states = ["starting", "running", "restarting", "stopping", "succeeded", "failed", "stopped", "lost"]
    assert [RunStatus.model_validate({**run, "state": state}).live for state in states] == [True] * 4 + [False] * 4


def test_hosts_are_in_use_while_a_process_on_them_runs() -> None:
    def ended(*ranks: int) -> list[dict[str, object]]:
        return [EndedRanks(ranks=tuple((rank, rank) for rank in ranks), reason="no").model_dump()]

    def mesh(**facts: object) -> MeshStatus:
        return MeshStatus.model_validate({"kind": "procs", "name": "procs", "sizes": {"gpus": 8}, **facts})

    hosts = ("workers-0", "workers-1")
    assert mesh(hosts=hosts, ended=[]).hosts_in_use() == set(hosts)
    assert mesh(hosts=hosts, ended=ended(0, 1, 2, 4, 5, 6, 7)).hosts_in_use() == {"workers-0"}
    assert mesh(hosts=hosts, ended=ended(*range(8))).hosts_in_use() == set()
    assert mesh().hosts_in_use() == set()  # an endpoint returned it
