"""Calls that the program cancels: what their ranks do, and what the user sees."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import meshgate as kt
from meshgate import CallCancelledError, ProcessJob
from meshgate.testing import NetworkProxy
from tests.end_to_end.call_actors import Blocker, Waiter
from tests.programs import ROOT
from tests.waiting import DEADLINE, Printed, wait_for

TIMEOUT = 60.0


@pytest.fixture
def waiters(procs: Any) -> Iterator[Any]:
    actors = procs.spawn("waiters", Waiter)
    said(actors)  # they are up
    yield actors
    actors.stop().get(timeout=TIMEOUT)


def until_begun(waiters: Any, name: str) -> None:
    """Returns once the call, of a concurrent endpoint, runs on all ranks."""
    began = f"{name} began"
    wait_for(lambda: all(began in said for said in waiters.said_so_far.call().get(timeout=TIMEOUT).values()), began)


def until_said(waiters: Any, what: list[str]) -> None:
    wait_for(lambda: all(each == what for each in said(waiters)), ", ".join(what))


def said(waiters: Any) -> list[list[str]]:
    return list(waiters.all_said.call().get(timeout=TIMEOUT).values())


def test_a_cancelled_call_ends_where_it_awaits_and_its_ranks_are_free(waiters: Any) -> None:
    hangs, behind = waiters.wait.call("hangs"), waiters.all_said.call()
    assert hangs.cancel()
    with pytest.raises(
        CallCancelledError, match=r"^waiters\.wait was cancelled: \d of 4 ranks had not answered$"
    ) as one:
        hangs.get(timeout=TIMEOUT)
    assert one.value.call == "waiters.wait"
    assert set(one.value.ranks) <= set(range(4))
    for each in behind.get(timeout=TIMEOUT).values():
        assert each in (["hangs began", "hangs cancelled"], [])  # [] where it was cancelled before it began
    assert not hangs.cancel()


PROMPT = """\
from meshgate import ProcessJob
from tests.client.session.test_cancellation import ctrl_c_when
from tests.end_to_end.call_actors import Waiter
job = ProcessJob({"hosts": 1})
waiters = job.state(None).hosts.spawn_procs().spawn("waiters", Waiter)
hangs = waiters.wait.call("hangs")
with ctrl_c_when(lambda: bool(hangs._wakers)): hangs.get()

print("then", waiters.all_said.call().get().values())
job.kill()
"""


@pytest.mark.timeout(2 * DEADLINE)
def test_ctrl_c_at_a_prompt_frees_the_ranks() -> None:
    ran = subprocess.run(
        [sys.executable, "-i", "-q"],
        input=PROMPT,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=DEADLINE,
        check=True,
    )
    assert re.search(r"meshgate: interrupted while waiting for waiters\.wait: .*\. The call is cancelled\n", ran.stderr)
    assert "Traceback" not in ran.stderr
    assert re.search(r"^then \[(\[\]|\['hangs began', 'hangs cancelled'\])\]$", ran.stdout, re.MULTILINE)


def test_a_call_that_runs_is_interrupted_on_every_rank(waiters: Any, procs: Any) -> None:
    beside = waiters.wait_beside.call("beside")
    until_begun(waiters, "beside")
    assert beside.cancel()
    assert isinstance(beside.exception(TIMEOUT), CallCancelledError)
    until_said(waiters, ["beside began", "beside cancelled"])


def test_a_call_that_waits_for_its_turn_does_not_run(waiters: Any, tmp_path: Path) -> None:
    holds = waiters.hold.call(str(tmp_path / "gate"))
    queued, behind = waiters.wait.call("queued"), waiters.all_said.call()
    assert queued.cancel()
    assert isinstance(queued.exception(TIMEOUT), CallCancelledError)
    (tmp_path / "gate").touch()
    assert len(holds.get(timeout=TIMEOUT)) == 4
    # On a rank that hears of it only as the call begins, it is interrupted.
    assert all(each in ([], ["queued began", "queued cancelled"]) for each in behind.get(timeout=TIMEOUT).values())


@pytest.mark.parametrize("adverb", ["call_one", "choose", "stream"])
def test_every_way_to_call_can_be_cancelled(waiters: Any, adverb: str) -> None:
    if adverb == "stream":
        first, *others = waiters.wait.stream("hangs")
        assert others[-1].cancel()
        assert all(isinstance(each.exception(TIMEOUT), CallCancelledError) for each in (first, *others))
    else:
        target = waiters.flatten("rank").slice(rank=3) if adverb == "call_one" else waiters
        future = getattr(target.wait, adverb)("hangs")
        assert future.cancel()
        assert isinstance(future.exception(TIMEOUT), CallCancelledError)
    said(waiters)  # all are free


def test_the_calls_around_a_cancelled_one_keep_their_results(waiters: Any) -> None:
    for _ in range(3):
        before = [waiters.all_said.call() for _ in range(100)]
        hangs = waiters.wait.call("hangs")
        after = [waiters.all_said.call() for _ in range(100)]
        assert hangs.cancel()
        assert all(len(each.get(timeout=TIMEOUT)) == 4 for each in before + after)
        assert isinstance(hangs.exception(TIMEOUT), CallCancelledError)


def test_a_result_that_comes_all_the_same_is_dropped(waiters: Any) -> None:
    stubborn = waiters.refuse_to_end.call()
    until_begun(waiters, "stubborn")
    assert stubborn.cancel()
    assert isinstance(stubborn.exception(TIMEOUT), CallCancelledError)
    until_begun(waiters, "stubborn again")
    waiters.open_gate.call()
    until_said(waiters, ["stubborn began", "stubborn cancelled", "stubborn again began"])


def test_a_function_that_is_not_async_runs_to_its_end_and_a_line_says_so(
    procs: Any, tmp_path: Path, printed: Printed
) -> None:
    blockers = procs.spawn("blockers", Blocker)
    gate, never = tmp_path / "gate", tmp_path / "never"
    blocks = blockers.block.call(str(tmp_path / "begun"), str(gate))
    for rank in range(4):
        wait_for((tmp_path / f"begun-{rank}").exists, "the call to begin")
    queued, behind = blockers.touch.call(str(never)), blockers.touch.call(str(tmp_path / "behind"))
    assert queued.cancel()
    assert blocks.cancel()
    assert isinstance(queued.exception(TIMEOUT), CallCancelledError)
    assert isinstance(blocks.exception(TIMEOUT), CallCancelledError)
    wait_for(lambda: "blockers.block was cancelled, but has not ended on rank 0 on " in printed.err, "the line")
    assert "only an async endpoint can be interrupted" in printed.err
    assert "blockers.touch" not in printed.err  # it has not begun, and will not
    gate.touch()
    assert len(behind.get(timeout=TIMEOUT)) == 4
    assert not never.exists()


def test_a_call_that_waits_for_its_processes_is_answered_at_once(hosts: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    starting = hosts.spawn_procs(per_host={"gpus": 1}, bootstrap=lambda: wait_for(gate.exists, "the gate"))
    waiters = starting.spawn("late", Waiter)
    first, second = (waiters.wait.call(name) for name in ("first", "second"))
    third = waiters.all_said.call()
    try:
        assert first.cancel()
        assert second.cancel()
        for each in (first, second):
            assert isinstance(each.exception(TIMEOUT), CallCancelledError)
    finally:
        gate.touch()
    assert list(third.get(timeout=TIMEOUT).values()) == [[]] * 2
    starting.stop().get(timeout=TIMEOUT)


def test_only_calls_that_have_no_outcome_can_be_cancelled(waiters: Any) -> None:
    done = waiters.all_said.call()
    done.get(timeout=TIMEOUT)
    assert not done.cancel()
    assert not waiters.initialized.cancel()


def test_an_exception_has_the_frames_of_the_endpoint_alone(waiters: Any) -> None:
    for endpoint_ in (waiters.fail, waiters.fail_beside):
        with pytest.raises(kt.ActorError) as failed:
            endpoint_.call(number=3, method="mean").get(timeout=TIMEOUT)
        assert "ValueError: mean 3" in str(failed.value)
        assert "in fail" in str(failed.value)
        assert "running_calls" not in str(failed.value)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 cannot tell whether an actor is being stopped")
def test_a_task_that_was_cancelled_in_an_endpoint_does_not_end_the_actor(waiters: Any) -> None:
    with pytest.raises(kt.ActorError, match=r"RuntimeError: the endpoint raised asyncio\.CancelledError") as failed:
        waiters.await_a_cancelled_task.call().get(timeout=TIMEOUT)
    assert "in await_a_cancelled_task" in str(failed.value)
    assert "running_calls" not in str(failed.value)
    assert said(waiters) == [[]] * 4


def test_a_cancelled_call_whose_rank_dies_has_one_answer(hosts: Any, tmp_path: Path) -> None:
    procs = hosts.spawn_procs(per_host={"gpus": 1})
    blockers = procs.spawn("doomed", Blocker)
    blocks = blockers.block.call(str(tmp_path / "begun"), str(tmp_path / "never"))
    wait_for((tmp_path / "begun-1").exists, "the call to begin")
    assert blocks.cancel()
    assert isinstance(blocks.exception(TIMEOUT), CallCancelledError)
    procs.stop().get(timeout=TIMEOUT)
    with pytest.raises(kt.MeshgateError):
        blockers.touch.call(str(tmp_path / "late")).get(timeout=TIMEOUT)


def test_a_call_is_cancelled_although_the_connection_is_cut(shared_job: ProcessJob) -> None:
    gateway: Any = shared_job._gateway
    with (
        NetworkProxy("127.0.0.1", urlsplit(shared_job.gateway_url).port or 0) as proxy,
        kt.Client(kt.UrlDialer(f"ws://127.0.0.1:{proxy.port}", gateway.record.token)) as client,
    ):
        waiters = client.attach_hosts("workers", 2).spawn_procs(name="cut").spawn("waiters", Waiter)
        hangs = waiters.wait_beside.call("hangs")
        until_begun(waiters, "hangs")
        proxy.freeze()
        assert hangs.cancel()
        proxy.cut()
        proxy.thaw()
        assert isinstance(hangs.exception(TIMEOUT), CallCancelledError)
        until_said(waiters, ["hangs began", "hangs cancelled"])
