"""What a gateway says about its job, read by a client of another version."""

from __future__ import annotations

from meshgate_wire.status import EndedRanks, MeshStatus, RunStatus, SessionStatus


def mesh(**facts: object) -> MeshStatus:
    return MeshStatus.model_validate({"kind": "procs", "name": "procs", "sizes": {"gpus": 8}, **facts})


def test_the_ranks_that_ended_are_those_of_all_reasons() -> None:
    ended = EndedRanks(ranks=((3, 3), (5, 7)), reason="exited with code 1", exit_code=1)
    assert list(ended.each()) == [3, 5, 6, 7]
    assert mesh(dead={3: "a report"}, ended=[ended.model_dump()]).endings() == (ended,)
    assert mesh(ended=[]).endings() == ()


def test_an_older_gateway_has_only_reports_of_ranks_that_ended() -> None:
    (ended,) = mesh(dead={7: "The actor failed:\n  ValueError: no\n"}).endings()
    assert (list(ended.each()), ended.reason, ended.age, ended.stopped) == ([7], "ValueError: no", None, False)


def test_reports_of_an_older_gateway_are_grouped_and_those_that_the_program_stopped_are_known() -> None:
    stopped = dict.fromkeys(range(4), "mesh 'procs' was stopped: done")
    found = mesh(dead={**stopped, 6: "it failed:\n  no", 5: "no", 7: 'mesh "it\'s" was stopped: done'}).endings()
    assert [(list(each.each()), each.reason, each.stopped) for each in found] == [
        ([0, 1, 2, 3, 7], "stopped by the program", True),
        ([5, 6], "no", False),
    ]


def test_a_newer_gateway_says_more_than_this_client_reads() -> None:
    ended = {"ranks": [[1, 1]], "reason": "gone", "later": 1}
    assert mesh(ended=[ended], later=1).endings() == (EndedRanks(ranks=((1, 1),), reason="gone"),)


def test_runs_that_have_not_ended_are_live() -> None:
    run = {"name": "night", "command": (), "age": 1}
    states = ["starting", "running", "restarting", "stopping", "succeeded", "failed", "stopped", "lost"]
    assert [RunStatus.model_validate({**run, "state": state}).live for state in states] == [True] * 4 + [False] * 4


def test_an_older_gateway_does_not_name_sessions() -> None:
    assert SessionStatus(session="s", owner="alice", connected=True, pid=1).name == ""
