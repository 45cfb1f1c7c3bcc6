"""Sessions that outlive their driver, however it ends, and are taken over by another process."""

from __future__ import annotations

import contextlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import meshgate as kt
from meshgate import ActorError, CallCancelledError, GatewayError, JobError, ProcessJob, SessionTakenOverError, job_load
from meshgate_processes.identity import identify_process
from tests.end_to_end.actors import Worker
from tests.end_to_end.drivers import JOB, READY
from tests.end_to_end.test_server_restart import kill_server
from tests.programs import ROOT, child_process
from tests.waiting import Printed, wait_for

TIMEOUT = 60.0


@contextlib.contextmanager
def run_driver(name: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A driver that is ready. It is killed at the end of the block."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.end_to_end.drivers", name, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with child_process(command, env=environment, text=True, **pipes) as driver:
        lines = []
        for line in driver.stderr:
            if line.strip() == READY:
                break
            lines.append(line)
        else:
            raise AssertionError(f"driver {name} ended: {''.join(lines)}")
        yield driver


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a test and its drivers, where the job is saved."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def load(directory: Path) -> Iterator[Callable[[], Any]]:
    """Loads the saved job, as another process would. The job is ended with the test."""
    loaded: list[Any] = []

    def load() -> Any:
        loaded.append(job_load(JOB))
        return loaded[-1]

    yield load
    for job in loaded:
        if job._client is not None:
            job._client.close()
    if Path(JOB).exists():
        job_load(JOB).kill()


def call(session: Any, tag: str) -> Any:
    (found,) = session.tagged(tag)
    return found


def test_another_process_finds_everything_that_a_killed_driver_has_left(
    directory: Path, load: Callable[[], Any], printed: Printed
) -> None:
    file = directory / "go"
    with run_driver("leave_everything", str(file)) as driver:
        driver.kill()
        assert "printed early" in driver.communicate()[0]
    job = load()
    (info,) = job.sessions()
    assert (info.name, info.detached, info.actors, info.procs) == ("train", True, ("workers",), ("procs",))
    assert f"(pid {driver.pid})" in info.holder

    session = job.attach("train")
    assert f"(pid {driver.pid})" in session.previous_holder
    assert (session.takeovers, session.never_received) == (1, 0)
    # Calls.
    states = {each.tag: each.state for each in session.calls if each.tag}
    assert states.pop("fails") in ("in flight", "finished")
    assert states.pop("both") == states.pop("stream") == states.pop("in flight") == "in flight"
    assert states == {"read": "read", "unread": "finished"}
    assert call(session, "read").future.get(TIMEOUT) == 1
    assert call(session, "unread").future.get(TIMEOUT) == 2
    assert call(session, "unread").endpoint == "workers.record"
    waiting = call(session, "in flight").future
    with pytest.raises(TimeoutError):
        waiting.get(0.2)
    file.touch()
    assert waiting.get(TIMEOUT) == "found go"
    assert sorted(call(session, "both").future.get(TIMEOUT).values()) == [5, 5]
    assert sorted(each.get(TIMEOUT) for each in call(session, "stream").futures) == [0, 1]
    with pytest.raises(ActorError, match="as it must"):
        call(session, "fails").future.get(TIMEOUT)
    # Meshes: full proxies, whose actors have kept their state.
    workers = session["workers"]
    assert list(inspect.signature(Worker.record._method).parameters) == list(workers.record._spec.signature.parameters)
    with pytest.raises(TypeError, match="too many positional arguments"):
        workers.record.call(1, 2)
    assert workers.slice(hosts=0).recorded.call_one().get(TIMEOUT) == [1, 2]
    again = session.procs["procs"].spawn("again", Worker)
    assert sorted(again.rank.call().get(TIMEOUT).values()) == [0, 1]
    assert job.state().workers is session.hosts["workers"]
    # Channels: what was not taken.
    port, receiver = session.channels["numbers"]
    assert [receiver.recv().get(TIMEOUT) for _ in range(3)] == [1, 2, 3]
    workers.slice(hosts=0).send_to.call_one(port, 1).get(TIMEOUT)
    assert receiver.recv().get(TIMEOUT) == 0
    # Output: what was read is not printed again.
    workers.slice(hosts=0).say.call_one("printed late").get(TIMEOUT)
    assert "printed early" not in wait_for_output(workers, printed, "printed late")


def test_a_session_is_ended_while_another_program_holds_it(job_of_its_own: ProcessJob) -> None:
    hosts = job_of_its_own.state(cached_path=None).workers
    workers = hosts.spawn_procs().spawn("workers", Worker)
    processes = [identify_process(pid) for pid in workers.pid.call().get(timeout=TIMEOUT).values()]
    hanging = workers.hang.call()
    (held,) = job_of_its_own.sessions(None)
    other = kt.job_loads(job_of_its_own.dumps())
    with pytest.raises(JobError, match=r"cannot end the session: the job does not have session 'nothing'"):
        other.end_session("nothing")
    assert other.end_session(held.id[:8]).id == held.id
    wait_for(lambda: not any(process is not None and process.alive for process in processes), "its processes to end")
    with pytest.raises(JobError, match="the name of the session is empty"):
        other.end_session("")
    with pytest.raises(GatewayError, match="does not know this session"):
        other.end_session("0" * 32)
    with pytest.raises(GatewayError, match="another program ended it"):
        hanging.get(timeout=TIMEOUT)
    again = job_of_its_own.state(cached_path=None).workers.spawn_procs().spawn("again", Worker)
    assert len(again.rank.call().get(timeout=TIMEOUT)) == 2


def test_a_session_is_taken_over_after_the_server_was_killed_too(directory: Path, load: Callable[[], Any]) -> None:
    with run_driver("leave_everything", str(directory / "go")):
        job = load()
        kill_server(job)
    kill_server(job)
    session = job.attach()
    assert call(session, "unread").future.get(TIMEOUT) == 2
    (directory / "go").touch()
    assert call(session, "in flight").future.get(TIMEOUT) == "found go"
    assert session["workers"].slice(hosts=0).recorded.call_one().get(TIMEOUT) == [1, 2]


def wait_for_output(workers: Any, printed: Printed, text: str) -> str:
    shown = ""
    while text not in shown:
        workers.rank.call().get(TIMEOUT)
        shown += printed.take()[0]
    return shown


def test_a_driver_that_ends_by_itself_leaves_its_session_running(
    directory: Path, load: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    file = directory / "go"
    with run_driver("exit_cleanly", str(file)) as driver:
        assert driver.wait(TIMEOUT) == 0
    session = load().attach()
    file.touch()
    assert call(session, "in flight").future.get(TIMEOUT) == "found go"
    assert call(session, "unread").future.get(TIMEOUT) == 2


def test_a_living_holder_gets_one_clear_error_and_output_can_be_replayed(
    directory: Path, load: Callable[[], Any], printed: Printed
) -> None:
    job = ProcessJob({"workers": 1})
    workers = job.state(JOB).workers.spawn_procs(name="procs").spawn("workers", Worker)
    workers.say.call_one("hello").get(TIMEOUT)  # before the session is detached: it is not kept
    with pytest.raises(kt.InvalidRequestError, match="not detached"):
        load().attach(job._client.session_id)
    wait_for_output(workers, printed, "hello")
    name = job.detach()
    workers.say.call_one("one line").get(TIMEOUT)
    wait_for_output(workers, printed, "one line")
    waiting = workers.hang.call_one()

    with pytest.raises(JobError, match="does not have session 'other'"):
        load().attach("other")
    second = load()
    session = second.attach(name, replay=True)
    for _ in range(2):
        with pytest.raises(
            SessionTakenOverError,
            match=r"another process \(.* \(pid \d+\)\) has taken over this session at .*job\.attach",
        ):
            waiting.get(TIMEOUT)
    with pytest.raises(SessionTakenOverError):
        workers.rank.call_one()
    assert "hello" not in wait_for_output(session.procs["procs"].spawn("others", Worker), printed, "one line")
    # The call of the first one can be cancelled.
    (hangs,) = [each.future for each in session.calls if each.endpoint == "workers.hang"]
    assert hangs.cancel()
    assert isinstance(hangs.exception(TIMEOUT), CallCancelledError)
    # It can be taken back.
    (info,) = load().sessions()
    assert info.connected
    third = load().attach()
    assert third.takeovers == 2
    with pytest.raises(SessionTakenOverError):
        session.actors["workers"].rank.call_one().get(TIMEOUT)
    job._client.close()


def test_the_death_of_a_driver_still_ends_a_job_that_is_not_detached(directory: Path) -> None:
    file = directory / "pid"
    with run_driver("bound", str(file)):
        worker = identify_process(int(file.read_text()))
        assert worker is not None
    assert worker.wait_ended(TIMEOUT)
