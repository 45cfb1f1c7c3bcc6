"""The nodes of a Slurm job: when they can be used, and why they no longer can."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from async_timeout import timeout

from meshgate_gateway.hosts import slurm
from meshgate_gateway.hosts.provider import Host, HostsUnavailable, JobEnd, MeshIncomplete
from meshgate_gateway.hosts.slurm import SlurmHosts, Worker, Workers
from meshgate_gateway.supervisor.supervisor import KeptDescriptors
from meshgate_slurm.commands import Unanswered, Unreachable
from meshgate_slurm.spec import DEFAULT_WARN_BEFORE, SlurmSpec
from meshgate_slurm.status import JobStatus

DEADLINE = 60.0
SECRET = "s3cret"


class Cluster:
    """A Slurm whose job is what the test says."""

    def __init__(self) -> None:
        self.job: JobStatus | Exception | None = JobStatus(job_id=7, state="PENDING", reason="Resources")
        self.cancelled = False
        self.batch_log = os.devnull
        self.logs: dict[str | None, str] = {}

    def set(self, state: str, **facts: Any) -> None:
        self.job = JobStatus(job_id=7, state=state, **facts)

    def status(self) -> JobStatus | None:
        if isinstance(self.job, Exception):
            raise self.job
        return self.job

    def node_state(self, node: str) -> str:
        return "DOWN: Not responding"

    def cancel(self) -> None:
        self.cancelled = True
        if isinstance(self.job, RuntimeError):
            raise self.job

    def log_tail(self, node: str | None) -> str:
        return self.logs.get(node, "")


class Connection:
    """That of a worker, of which only its end matters."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    def is_closing(self) -> bool:
        return False

    def write_eof(self) -> None:
        self.ended.set()


class Watched:
    def __init__(self, **spec: Any) -> None:
        self.cluster = Cluster()
        self.hosts = SlurmHosts(
            SlurmSpec(**{"meshes": {"a": 1, "b": 1}, **spec}), 7, self.cluster, "s3cret", Supervisor()
        )
        self.lost: asyncio.Queue[tuple[str, str, str]] = asyncio.Queue()
        self.ends: asyncio.Queue[JobEnd | None] = asyncio.Queue()
        self.hosts.watch(lambda *loss: self.lost.put_nowait(loss), lambda *_: None)
        self.hosts.watch_end(self.ends.put_nowait)

    def connect(self, rank: int) -> Worker:
        name = f"n{rank + 1}"
        connection: Any = Connection()
        worker = Worker(rank, Host(name=name, address=f"tcp://{name}:1", node=name), connection=connection)
        self.hosts.workers.by_rank[rank] = worker
        self.hosts._wake()
        return worker

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self.hosts._wait_changed(DEADLINE)

    def ended(self, rank: int) -> asyncio.Event:
        """Set when the gateway has ended the worker."""
        connection: Any = self.hosts.workers.by_rank[rank].connection
        ended: asyncio.Event = connection.ended
        return ended

    def hold_answers(self) -> tuple[threading.Semaphore, threading.Semaphore]:
        """From now on the first is released when Slurm is asked, and the answer comes once the second is released."""
        asked, answered = threading.Semaphore(0), threading.Semaphore(0)
        read = self.cluster.status

        def status() -> JobStatus | None:
            known = read()
            asked.release()
            assert answered.acquire(timeout=DEADLINE)
            return known

        self.cluster.status = status  # type: ignore[method-assign]
        return asked, answered

    def run(self) -> None:
        self.cluster.set("RUNNING", nodes=("n1", "n2"))
        self.connect(0)
        self.connect(1)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "POLL_INTERVAL", 0.01)
    monkeypatch.setattr(slurm, "REASON_TIMEOUT", 0.2)


@contextlib.asynccontextmanager
async def watching(**spec: Any) -> AsyncIterator[Watched]:
    watched = Watched(**spec)
    try:
        async with timeout(DEADLINE):
            yield watched
    finally:
        await watched.hosts.close()


async def test_each_mesh_waits_for_its_own_workers() -> None:
    async with watching() as watched:
        second = asyncio.create_task(watched.hosts.hosts("b"))
        ready = asyncio.create_task(watched.hosts.wait_ready())
        watched.connect(1)
        assert [host.name for host in await second] == ["n2"]
        assert {rank: host.name for rank, host in watched.hosts.present("b").items()} == {0: "n2"}
        assert not ready.done()
        watched.connect(0)
        await ready
        assert [host.name for host in watched.hosts.present("a").values()] == ["n1"]
        assert watched.hosts.meshes() == {"a": 1, "b": 1}


async def test_a_mesh_is_incomplete_once_it_is_known_why_a_worker_has_ended() -> None:
    async with watching(meshes={"a": 2}) as watched:
        watched.run()
        first, second = await watched.hosts.hosts("a")
        worker = watched.hosts.workers.by_rank[1]
        worker.connected = False
        asked = asyncio.create_task(watched.hosts.hosts("a"))
        await asyncio.sleep(0)
        assert not asked.done()
        watched.hosts._worker_gone(worker)
        _, host, reason = await watched.lost.get()
        with pytest.raises(MeshIncomplete, match="mesh 'a' is incomplete: n2: the worker on this node") as caught:
            await asked
        assert (caught.value.hosts, caught.value.lost) == ((first, second), {host: reason})


async def test_the_report_says_why_the_job_waits() -> None:
    async with watching() as watched:
        await watched.until(lambda: watched.hosts.report().why.startswith("Resources"))
        report = watched.hosts.report()
        assert (report.pending, report.registered, report.nodes) == (True, 0, 2)
        watched.cluster.job = Unanswered("squeue failed: Socket timed out\nTry again")
        silent = "when Slurm's controller last answered; now squeue failed: Socket timed out"
        await watched.until(lambda: watched.hosts.report().why == silent)
        watched.cluster.set("PENDING", reason="Priority")
        await watched.until(lambda: watched.hosts.report().why.startswith("Priority"))


async def test_the_end_of_the_job_is_the_loss_of_every_host_with_the_reason_and_the_log() -> None:
    async with watching() as watched:
        watched.run()
        watched.cluster.logs["n1"] = "one\ntwo\n"
        await watched.hosts.wait_ready()
        watched.cluster.set("TIMEOUT", time_limit=5)
        losses = [await watched.lost.get(), await watched.lost.get()]
        reason = "Slurm ended job 7: TIMEOUT: it reached its time limit of 5 min"
        assert losses == [
            ("a", "n1", f"{reason}\nThe last lines of the worker on n1:\n  one\n  two"),
            ("b", "n2", reason),
        ]
        with pytest.raises(HostsUnavailable, match="mesh 'a' is incomplete: n1: Slurm ended job 7") as caught:
            await watched.hosts.hosts("a")
        assert not isinstance(caught.value, MeshIncomplete)
        assert watched.hosts.report().ended
        assert [watched.hosts.present(mesh) for mesh in "ab"] == [{}, {}]  # although the workers end a moment later
        assert watched.hosts.all_lost()


async def test_a_job_that_ends_with_its_first_node_names_the_node() -> None:
    async with watching() as watched:
        watched.run()
        await watched.hosts.wait_ready()
        watched.cluster.set("NODE_FAIL", batch_host="n1", reason="NodeDown")
        reason = "Slurm ended job 7: NODE_FAIL: a node failed: n1 (DOWN: Not responding)"
        assert [await watched.lost.get(), await watched.lost.get()] == [("a", "n1", reason), ("b", "n2", reason)]
        assert watched.hosts.report().why == reason


async def test_a_job_that_is_requeued_has_ended_and_is_cancelled() -> None:
    async with watching() as watched:
        watched.cluster.set("PENDING", restarts=1)  # its first start failed before any worker
        await watched.until(lambda: watched.hosts._restarts == 1)
        watched.connect(0)
        watched.connect(1)
        watched.cluster.set("RUNNING", nodes=("n1", "n2"), restarts=1)
        await watched.until(lambda: watched.hosts.report().state == "RUNNING")
        watched.cluster.set("PENDING", reason="BeginTime", restarts=2)
        assert "Slurm ended job 7: REQUEUE: it was put back into the queue" in (await watched.lost.get())[2]
        assert watched.cluster.cancelled
        assert watched.hosts.report().ended


async def test_a_node_that_slurm_takes_away_is_lost_alone() -> None:
    async with watching() as watched:
        watched.run()
        await watched.hosts.wait_ready()
        watched.cluster.set("RUNNING", nodes=("n1",))
        assert await watched.lost.get() == ("b", "n2", "Slurm took node n2 from job 7 (DOWN: Not responding)")
        assert watched.hosts.present("a")
        assert not watched.hosts.present("b")  # although its connection may stay open
        assert not watched.hosts.all_lost()
        assert watched.lost.empty()
        watched.cluster.set("RUNNING", nodes=("n3",))
        await watched.lost.get()
        assert watched.hosts.all_lost()


async def test_hosts_are_not_all_lost_while_one_is_still_starting() -> None:
    async with watching() as watched:
        watched.connect(1)
        watched.cluster.set("RUNNING", nodes=("n1",))
        assert (await watched.lost.get())[:2] == ("b", "n2")
        assert not watched.hosts.present("a")
        assert not watched.hosts.all_lost()
        watched.hosts._failed = "it did not start"
        assert watched.hosts.all_lost()


async def test_a_worker_that_ends_by_itself_is_lost_after_slurm_had_its_time() -> None:
    async with watching() as watched:
        watched.run()
        worker = watched.hosts.workers.by_rank[0]
        worker.connected = False
        watched.hosts._worker_gone(worker)
        assert await watched.lost.get() == ("a", "n1", "the worker on this node ended, while Slurm job 7 runs")


async def test_the_end_of_a_worker_waits_for_an_answer_of_slurm_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "ANSWER_TIMEOUT", DEADLINE)
    async with watching() as watched:
        watched.run()
        await watched.hosts.wait_ready()
        asked, answered = watched.hold_answers()
        assert await asyncio.to_thread(asked.acquire, timeout=DEADLINE)
        watched.hosts._worker_gone(watched.hosts.workers.by_rank[0])
        await asyncio.sleep(2 * slurm.REASON_TIMEOUT)
        watched.cluster.set("TIMEOUT", time_limit=5)
        answered.release()  # with what was true before the worker ended
        assert await asyncio.to_thread(asked.acquire, timeout=DEADLINE)
        await asyncio.sleep(2 * slurm.REASON_TIMEOUT)
        assert watched.lost.empty()
        answered.release()
        assert (await watched.lost.get())[2].startswith("Slurm ended job 7: TIMEOUT")


async def test_a_slurm_that_does_not_answer_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "ANSWER_TIMEOUT", 0.3)
    async with watching() as watched:
        watched.run()
        await watched.hosts.wait_ready()
        asked, answered = threading.Event(), threading.Event()
        read = watched.cluster.status

        def status() -> JobStatus | None:
            asked.set()
            assert answered.wait(DEADLINE)
            return read()

        watched.cluster.status = status  # type: ignore[method-assign]
        await asyncio.to_thread(asked.wait, DEADLINE)
        watched.hosts._worker_gone(watched.hosts.workers.by_rank[0])
        assert (await watched.lost.get())[2] == "the worker on this node ended, while Slurm job 7 runs"
        answered.set()


async def test_a_slurm_that_fails_is_asked_at_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "POLL_INTERVAL", 600.0)
    async with watching() as watched:
        watched.run()
        await watched.hosts.wait_ready()
        await watched.until(lambda: watched.hosts._answered == 1)
        watched.cluster.job = Unreachable("slurmctld does not answer")
        watched.hosts._worker_gone(watched.hosts.workers.by_rank[0])
        await watched.lost.get()
        assert watched.hosts._asked == 2


async def test_a_worker_that_ends_while_the_logs_of_a_cancelled_job_are_read_was_cancelled() -> None:
    async with watching() as watched:
        watched.run()
        await watched.hosts.wait_ready()
        reading, first = threading.Event(), itertools.count()
        read = watched.cluster.log_tail

        def log_tail(node: str | None) -> str:
            if node == "n1" and next(first) == 0:  # as the job has ended
                reading.wait(DEADLINE)
            return read(node)

        watched.cluster.log_tail = log_tail  # type: ignore[method-assign]
        watched.cluster.set("CANCELLED")
        while not watched.hosts._status.ended:  # noqa: ASYNC110 - which sets no event before the logs are read
            await asyncio.sleep(0)
        watched.hosts._worker_gone(watched.hosts.workers.by_rank[0])
        reason = (await watched.lost.get())[2]
        reading.set()
        assert reason.startswith("Slurm ended job 7: CANCELLED")


async def test_a_worker_that_cannot_start_is_named_at_once() -> None:
    async with watching() as watched:
        watched.cluster.logs[None] = "srun: error: n2: task 1: Exited with exit code 127\n"
        watched.cluster.logs["n2"] = "python: not found"
        watched.cluster.set("RUNNING", nodes=("n1", "n2"))
        with pytest.raises(
            HostsUnavailable, match=r"(?s)the worker on n2 ended before it was ready: task 1.*not found"
        ):
            await watched.hosts.hosts("a")
        await watched.hosts.wait_ready()


async def test_a_job_that_failed_with_its_log_elsewhere_names_the_log() -> None:
    async with watching() as watched:
        watched.cluster.batch_log = "/nonexistent/batch.log"
        watched.cluster.set("FAILED")
        with pytest.raises(
            HostsUnavailable, match=r"the log of the batch script, /nonexistent/batch.log\. Do the nodes"
        ):
            await watched.hosts.hosts("a")


async def test_workers_that_do_not_connect_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "WORKERS_TIMEOUT", 0.05)
    async with watching() as watched:
        watched.connect(0)
        watched.cluster.set("RUNNING", nodes=("n1", "n2"))
        with pytest.raises(HostsUnavailable, match=r"the workers on n2 did not connect within 0.05 s"):
            await watched.hosts.hosts("b")


async def test_a_job_that_slurm_has_forgotten_has_ended_and_one_that_it_cannot_tell_about_has_not() -> None:
    async with watching() as watched:
        watched.run()
        await watched.hosts.wait_ready()
        for problem in (Unreachable("slurmctld does not answer"), RuntimeError("can't start new thread")):
            watched.cluster.job = problem
            failed = watched.hosts._answered + 1  # perhaps of a poll that began before
            await watched.until(lambda failed=failed: watched.hosts._answered > failed)  # type: ignore[misc]
            assert watched.lost.empty()
        watched.cluster.job = None
        assert (await watched.lost.get())[2] == "Slurm job 7 has ended, and Slurm no longer knows why"


async def test_the_time_limit_is_announced_once_and_taken_back_when_it_is_raised() -> None:
    async with watching(warn_before=100) as watched:
        end = time.time() + 60
        watched.cluster.set("RUNNING", nodes=("n1", "n2"), end_time=end)
        found = await watched.ends.get()
        assert found is not None
        assert (found.reason, found.at) == ("Slurm ends job 7 at its time limit", end)
        assert found.notice.startswith("Slurm ends job 7 at ")
        await asyncio.sleep(0.05)
        assert watched.ends.empty()
        watched.cluster.set("RUNNING", nodes=("n1", "n2"), end_time=end + 3600)
        assert await watched.ends.get() is None
        watched.cluster.set("RUNNING", nodes=("n1", "n2"), end_time=end)
        again = await watched.ends.get()
        assert again is not None
        assert (again.reason, again.at) == (found.reason, found.at)  # the text has the time that is left by then
        watched.cluster.set("RUNNING", nodes=("n1", "n2"), end_time=time.time() - 1)  # Slurm looks every half minute
        answered = watched.hosts._answered + 1  # perhaps of a poll that began before
        await watched.until(lambda: watched.hosts._answered > answered)
        assert watched.ends.empty()


async def test_a_notice_of_the_server_before_this_one_is_taken_back_once() -> None:
    async with watching(warn_before=100) as watched:
        watched.cluster.set("RUNNING", nodes=("n1", "n2"), end_time=time.time() + 3600)
        assert await watched.ends.get() is None
        answered = watched.hosts._answered + 2
        await watched.until(lambda: watched.hosts._answered > answered)
        assert watched.ends.empty()


async def test_a_short_job_has_notice_in_its_second_half_by_default() -> None:
    async with watching() as watched:

        async def poll(left: float) -> None:
            watched.cluster.set("RUNNING", nodes=("n1", "n2"), end_time=time.time() + left, time_limit=10)
            answered = watched.hosts._answered + 1  # perhaps of a poll that began before
            await watched.until(lambda: watched.hosts._answered > answered)

        await poll(590)
        assert watched.ends.get_nowait() is None
        await poll(290)
        assert await watched.ends.get() is not None


async def test_the_default_in_seconds_holds_for_a_short_job_that_asks_for_it() -> None:
    async with watching(warn_before=DEFAULT_WARN_BEFORE) as watched:
        watched.cluster.set("RUNNING", nodes=("n1", "n2"), end_time=time.time() + 590, time_limit=10)
        assert await watched.ends.get() is not None


async def test_the_workers_of_a_preempted_job_go_on_for_its_grace_time() -> None:
    async with watching(warn_before=0) as watched:
        watched.run()
        await watched.hosts.wait_ready()
        end = time.time() + 60
        watched.cluster.set("RUNNING", nodes=("n1", "n2"), end_time=end, preempted_at=end - 60)
        watched.hosts._worker_signalled(watched.hosts.workers.by_rank[0])
        found = await watched.ends.get()
        assert found is not None
        why = "a job of another partition or QOS takes its nodes"
        assert (found.reason, found.at) == (f"Slurm ends job 7 because {why}", end)
        assert found.notice.startswith("Slurm ends job 7 at ")
        assert found.notice.endswith(why)
        answered = watched.hosts._answered + 1  # perhaps of a poll that began before
        await watched.until(lambda: watched.hosts._answered > answered)
        assert not watched.ended(0).is_set()
        watched.cluster.set("PREEMPTED", preempted_at=end - 60)
        assert (await watched.lost.get())[2].startswith("Slurm ended job 7: PREEMPTED")
        await watched.ended(0).wait()
        await watched.ended(1).wait()  # whose SIGTERM may be on its way


async def test_a_job_that_slurm_suspends_has_notice_until_it_is_resumed() -> None:
    async with watching(warn_before=0) as watched:
        watched.run()
        watched.cluster.set("SUSPENDED", nodes=("n1", "n2"))
        before = time.time()
        found = await watched.ends.get()
        assert found is not None
        assert found.reason == "Slurm has suspended job 7"
        assert before < found.at - slurm.SUSPENSION_LIMIT <= time.time()
        assert "`scontrol resume 7`" in found.notice
        answered = watched.hosts._answered + 1  # perhaps of a poll that began before
        await watched.until(lambda: watched.hosts._answered > answered)
        assert watched.ends.empty()
        watched.cluster.set("RUNNING", nodes=("n1", "n2"))
        assert await watched.ends.get() is None
        watched.cluster.set("SUSPENDED", nodes=("n1", "n2"))
        assert await watched.ends.get() is not None
        watched.cluster.set("CANCELLED")
        await watched.lost.get()
        assert watched.ends.empty()


async def test_a_job_that_is_resumed_near_its_time_limit_has_that_notice_again() -> None:
    async with watching(warn_before=100) as watched:
        facts = {"nodes": ("n1", "n2"), "end_time": time.time() + 50}
        for state, reason in (
            ("RUNNING", "Slurm ends job 7 at its time limit"),
            ("SUSPENDED", "Slurm has suspended job 7"),
            ("RUNNING", None),
        ):
            watched.cluster.set(state, **facts)
            found = await watched.ends.get()
            assert (found and found.reason) == reason
        found = await watched.ends.get()
        assert found is not None
        assert found.reason == "Slurm ends job 7 at its time limit"


async def test_a_worker_that_gets_sigterm_from_another_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "POLL_INTERVAL", 600.0)  # so Slurm is asked because of the signal
    async with watching() as watched:
        watched.run()
        await watched.until(lambda: watched.hosts._answered == 1)
        watched.hosts._worker_signalled(watched.hosts.workers.by_rank[0])
        await watched.ended(0).wait()
        assert not watched.ended(1).is_set()


async def test_what_slurm_said_before_a_signal_does_not_end_the_worker() -> None:
    async with watching() as watched:
        watched.run()
        await watched.hosts.wait_ready()
        asked, answered = watched.hold_answers()
        assert await asyncio.to_thread(asked.acquire, timeout=DEADLINE)
        watched.hosts._worker_signalled(watched.hosts.workers.by_rank[0])
        watched.cluster.set("RUNNING", nodes=("n1", "n2"), end_time=time.time() + 60, preempted_at=time.time())
        answered.release()  # with what was true before the signal
        assert await asyncio.to_thread(asked.acquire, timeout=DEADLINE)
        assert not watched.ended(0).is_set()
        watched.cluster.set("PREEMPTED")
        answered.release()
        assert await watched.ends.get() is not None
        assert not watched.ended(0).is_set()
        answered.release()
        await watched.ended(0).wait()


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETED"])
async def test_a_worker_that_gets_sigterm_when_slurm_is_no_longer_asked_ends_at_once(state: str) -> None:
    async with watching() as watched:
        watched.connect(0)
        watched.cluster.set(state)
        await watched.until(lambda: watched.hosts.report().state == state)
        if state == "RUNNING":
            await watched.hosts.close()
        else:
            await watched.ended(0).wait()
            watched.ended(0).clear()
        watched.hosts._worker_signalled(watched.hosts.workers.by_rank[0])
        assert watched.ended(0).is_set()


@pytest.mark.parametrize(
    ("state", "problem"),
    [("RUNNING", None), ("RUNNING", RuntimeError("can't start new thread")), ("COMPLETED", None)],
)
async def test_the_job_is_cancelled_with_its_gateway_unless_it_has_ended(state: str, problem: Exception | None) -> None:
    async with watching() as watched:
        watched.cluster.set(state)
        await watched.until(lambda: watched.hosts.report().state == state)
        watched.cluster.job = problem or watched.cluster.job
        await watched.hosts.close()
        assert watched.cluster.cancelled == (state == "RUNNING")


class Supervisor:
    """Keeps descriptors as the real one does: in copies."""

    def __init__(self) -> None:
        self.kept: dict[str, KeptDescriptors] = {}

    def keep(self, key: str, note: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        self.close(key)
        self.kept[key] = KeptDescriptors(note, [os.dup(descriptor) for descriptor in descriptors])

    def close(self, *keys: str) -> None:
        for key in keys:
            for descriptor in self.kept.pop(key, KeptDescriptors({})).descriptors:
                os.close(descriptor)


class Gateway:
    def __init__(self) -> None:
        self.supervisor = Supervisor()
        self.changes = asyncio.Event()
        self.gone: asyncio.Queue[Worker] = asyncio.Queue()
        self.signalled: asyncio.Queue[Worker] = asyncio.Queue()
        self.workers = Workers(
            2,
            SECRET,
            self.supervisor,
            changed=self.changes.set,
            signalled=self.signalled.put_nowait,
            gone=self.gone.put_nowait,
        )
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]

    async def register(self, **facts: Any) -> tuple[dict[str, Any], asyncio.StreamWriter]:
        self.reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        place = {"node": "n1", "address": "tcp://10.0.0.1:5000", "identity": ""}
        hello = {"secret": SECRET, "rank": 0, "python": "3.11.7", **place, **facts}
        writer.write(json.dumps(hello).encode() + b"\n")
        return json.loads(await self.reader.readline()), writer


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[Gateway]:
    gateway = Gateway()
    await gateway.workers.listen(gateway.listener)
    try:
        async with timeout(DEADLINE):
            yield gateway
    finally:
        await gateway.workers.close()
        gateway.supervisor.close(*gateway.supervisor.kept)


async def test_a_worker_is_known_while_it_is_connected() -> None:
    async with listening() as gateway:
        reply, writer = await gateway.register(rank=1, node="n2")
        assert reply == {"ok": True}
        worker = gateway.workers.by_rank[1]
        assert (worker.host.name, worker.host.address, worker.connected) == ("n2", "tcp://10.0.0.1:5000", True)
        assert (worker.host.python, worker.host.monarch) == ("3.11.7", "")
        assert gateway.changes.is_set()
        writer.close()
        assert await gateway.gone.get() is worker
        assert not worker.connected


async def test_a_worker_that_got_sigterm_goes_on_until_it_is_ended() -> None:
    async with listening() as gateway:
        _, writer = await gateway.register()
        writer.write(b'{"signal": "SIGTERM"}\n')
        worker = await gateway.signalled.get()
        assert worker.connected
        worker.end()
        assert await gateway.reader.read() == b""  # although the supervisor has a copy of the connection
        assert worker.connected
        writer.close()
        assert await gateway.gone.get() is worker
        worker.end()  # has no effect


async def test_a_gateway_that_ends_also_ends_workers_whose_connections_the_supervisor_keeps() -> None:
    async with listening() as gateway:
        _, writer = await gateway.register()
        await gateway.workers.close()
        assert await gateway.reader.read() == b""
        writer.close()


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"secret": "other"}, "the secret is not that of this job"),
        ({"rank": 2}, "rank 2 is not one of the job's 2"),
        ({"rank": -1}, "invalid registration"),
        ({"node": ""}, "invalid registration"),
    ],
)
async def test_others_get_the_reason_why_they_cannot_join(facts: dict[str, Any], problem: str) -> None:
    async with listening() as gateway:
        reply, writer = await gateway.register(**facts)
        assert problem in reply["error"]
        assert not gateway.workers.by_rank
        writer.close()


async def test_a_rank_is_given_once() -> None:
    async with listening() as gateway:
        _, first = await gateway.register()
        reply, second = await gateway.register(node="n9")
        assert reply["error"] == "rank 0 is already taken, by the worker on n1"
        assert gateway.workers.by_rank[0].host.name == "n1"
        first.close()
        second.close()


async def test_a_line_without_end_takes_no_memory() -> None:
    async with listening() as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(b"x" * 100_000)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()


async def test_a_further_server_takes_the_workers_over() -> None:
    async with listening() as gateway:
        _, first = await gateway.register(rank=0)
        _, second = await gateway.register(rank=1, node="n2")
        gateway.workers.record_loss(gateway.workers.by_rank[1], "it broke")
        inherited = Supervisor()
        for key, kept in gateway.supervisor.kept.items():
            inherited.keep(key, kept.note, kept.descriptors)
        successor = Workers(
            2, SECRET, inherited, changed=lambda: None, signalled=lambda worker: None, gone=gateway.gone.put_nowait
        )
        await successor.listen(socket.create_server(("127.0.0.1", 0)))
        assert {rank: (worker.connected, worker.lost) for rank, worker in successor.by_rank.items()} == {
            0: (True, None),
            1: (False, "it broke"),
        }
        first.close()
        second.close()
        gone = [await gateway.gone.get() for _ in range(3)]
        assert successor.by_rank[0] in gone
        await successor.close()
