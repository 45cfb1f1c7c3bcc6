"""The nodes of a Slurm job as Monarch hosts.

Two sources say how they are. The workers' own connections end with them, at once. Slurm is asked every two seconds, in
one request, for the state of the job: it knows why a job waits and why it ended, which nodes failed, and when the time
limit comes. When a worker is lost, Slurm has a moment to say why before the loss is reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import math
import re
import socket
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import async_timeout
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshgate_gateway.hosts.provider import Host, HostsUnavailable, JobEnd, MeshIncomplete, OnLost, OnRestored
from meshgate_gateway.logs import EventLog
from meshgate_gateway.supervisor.link import SupervisorLink
from meshgate_gateway.supervisor.supervisor import KeptDescriptors
from meshgate_slurm.commands import SlurmError, Unanswered
from meshgate_slurm.messages import JobReport
from meshgate_slurm.spec import DEFAULT_WARN_BEFORE, SlurmSpec
from meshgate_slurm.status import REQUEUED, UNKNOWN, JobStatus, last_lines, missing_log

log = EventLog()

POLL_INTERVAL = 2.0
REASON_TIMEOUT = 4.0  # seconds that Slurm has to explain the end of a worker
ANSWER_TIMEOUT = 12.0  # seconds that it has if it has not answered since then: as long as the engine waits for a reason
SUSPENSION_LIMIT = 30.0  # seconds after which Monarch takes a process that is stopped for dead
WORKERS_TIMEOUT = 300.0  # seconds from the start of the job until every worker must have connected
_TASK_ENDED = re.compile(r"^srun: error: (?P<nodes>\S+): (?P<what>tasks? .*)$", re.MULTILINE)
KEPT = "slurm worker "  # begins the keys of what the supervisor keeps of them
MAX_LINE = 4096
REGISTRATION_TIMEOUT = 10.0
MAX_PENDING = 1024  # connections that have not registered yet


# The workers of a Slurm job, each of which connects to the gateway for as long as it runs.
#
# A worker sends one line of JSON: the job's secret, its rank and node, and the address of its Monarch host. The end of
# its connection is the end of the worker, seen at once, however it ends; only a node that loses its power is silent.
# A further line says that the worker has got SIGTERM. It continues, because that may be Slurm's notice of a preemption,
# until this end of the connection is shut down.
# The supervisor keeps a copy of each connection, so that the workers outlive this server.


class Registration(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    secret: str = Field(max_length=256)
    rank: int = Field(ge=0)
    node: str = Field(min_length=1, max_length=255)
    address: str = Field(min_length=1, max_length=512)
    identity: str = Field(max_length=64)
    python: str = Field(default="", max_length=64)
    monarch: str = Field(default="", max_length=64)


@dataclass(slots=True)
class Worker:
    """A worker that has registered. ``lost``: why it cannot be used any more. ``signalled``: it has got SIGTERM."""

    rank: int
    host: Host
    connected: bool = True
    lost: str | None = None
    signalled: bool = False
    connection: asyncio.StreamWriter | None = None

    def end(self) -> None:
        """Makes the worker end. Its own end of the connection stays open until it has."""
        if self.connection is not None:
            _shut_down(self.connection)

    @property
    def key(self) -> str:
        return f"{KEPT}{self.rank}"

    def note(self) -> dict[str, Any]:
        return {"rank": self.rank, "host": self.host.model_dump(), "lost": self.lost}


class Workers:
    """The workers by rank. ``changed()`` is called when one has registered, ``signalled(worker)`` when one has got
    SIGTERM, ``gone(worker)`` when one has ended."""

    def __init__(
        self,
        count: int,
        secret: str,
        keeper: SupervisorLink,
        *,
        changed: Callable[[], None],
        signalled: Callable[[Worker], None],
        gone: Callable[[Worker], None],
    ) -> None:
        self.by_rank: dict[int, Worker] = {}
        self._keeper = keeper
        self._tasks: set[asyncio.Task[None]] = set()
        self._count, self._secret = count, secret
        self._changed, self._signalled, self._gone = changed, signalled, gone
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self._unregistered = 0

    async def listen(self, listener: socket.socket) -> None:
        """Accepts workers on the listening socket, and takes over those of an earlier server."""
        for key, kept in self._keeper.kept.items():
            if key.startswith(KEPT):
                await self._adopt(kept)
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=MAX_LINE)

    async def close(self) -> None:
        """Ends every connection, and with it every worker."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            _shut_down(connection)  # because the supervisor has a copy, too
            connection.close()

    def record_loss(self, worker: Worker, reason: str) -> None:
        """The worker cannot be used any more, in a further server neither."""
        worker.lost = reason
        self._keeper.keep(worker.key, worker.note())

    async def _adopt(self, kept: KeptDescriptors) -> None:
        host = Host.model_validate(kept.note["host"])
        worker = self.by_rank[kept.note["rank"]] = Worker(kept.note["rank"], host, lost=kept.note["lost"])
        if not kept.descriptors:
            worker.connected = False
            return
        reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=kept.descriptors[0]), limit=MAX_LINE)
        self._connections.add(writer)
        task = asyncio.create_task(self._wait_gone(worker, reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wait_gone(self, worker: Worker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        worker.connection = writer
        try:
            while await reader.readline():
                log.info("worker got SIGTERM", rank=worker.rank, node=worker.host.name)
                self._signalled(worker)
        except (OSError, ValueError) as error:
            log.debug("worker connection failed", reason=str(error))
        finally:
            self._connections.discard(writer)
            writer.close()
            worker.connected = False
            self._gone(worker)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._unregistered >= MAX_PENDING:
            writer.close()
            return
        self._connections.add(writer)
        self._unregistered += 1
        registered: Worker | None = None
        try:
            registered = await self._register(reader, writer)
        except (OSError, asyncio.TimeoutError, ValueError) as error:
            log.debug("worker did not register", reason=str(error) or type(error).__name__)
        finally:
            self._unregistered -= 1
            if registered is None:
                self._connections.discard(writer)
                writer.close()
        if registered is not None:
            await self._wait_gone(registered, reader, writer)

    async def _register(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Worker | None:
        async with async_timeout.timeout(REGISTRATION_TIMEOUT):
            line = await reader.readline()
        try:
            registration = Registration.model_validate_json(line)
        except ValidationError as error:
            problem = f"invalid registration: {error.errors(include_url=False)[0]['msg']}"
        else:
            problem = self._refuse(registration)
        if problem:
            peer = (writer.get_extra_info("peername") or ("?",))[0]
            log.warning("worker refused", reason=problem, peer=peer)
            writer.write(json.dumps({"error": problem}).encode() + b"\n")
            await writer.drain()
            return None
        host = Host(
            name=registration.node,
            address=registration.address,
            identity=registration.identity,
            node=registration.node,
            python=registration.python,
            monarch=registration.monarch,
        )
        worker = self.by_rank[registration.rank] = Worker(registration.rank, host)
        self._keeper.keep(worker.key, worker.note(), [writer.get_extra_info("socket").fileno()])
        writer.write(b'{"ok": true}\n')
        await writer.drain()
        log.info("worker connected", rank=worker.rank, node=host.name, address=host.address)
        self._changed()
        return worker

    def _refuse(self, registration: Registration) -> str:
        """Why the worker cannot join; "" if it can."""
        if not hmac.compare_digest(registration.secret.encode(), self._secret.encode()):
            return "the secret is not that of this job"
        if registration.rank >= self._count:
            return f"rank {registration.rank} is not one of the job's {self._count}"
        known = self.by_rank.get(registration.rank)
        if known is not None:
            return f"rank {registration.rank} is already taken, by the worker on {known.host.name}"
        return ""


class Cluster(Protocol):
    """What the hosts need of Slurm. All methods but ``log_tail`` raise SlurmError; all may block."""

    @property
    def batch_log(self) -> str:
        """The path of the log of the batch script."""

    def status(self) -> JobStatus | None:
        """The job; None if Slurm no longer knows it."""

    def node_state(self, node: str) -> str: ...

    def cancel(self) -> None: ...

    def log_tail(self, node: str | None) -> str:
        """The end of the log of the worker on ``node``, or of the batch script; "" if it cannot be read."""


class SlurmHosts:
    """A HostProvider whose hosts are the workers of one submitted job."""

    def __init__(
        self, spec: SlurmSpec, job_id: int, cluster: Cluster, workers_secret: str, keeper: SupervisorLink
    ) -> None:
        self.workers = Workers(
            spec.nodes,
            workers_secret,
            keeper,
            changed=self._wake,
            signalled=self._worker_signalled,
            gone=self._worker_gone,
        )
        self._spec, self._job_id, self._cluster = spec, job_id, cluster
        self._ranks: dict[str, range] = {}
        first = 0
        for mesh, count in spec.meshes.items():
            self._ranks[mesh] = range(first, first + count)
            first += count
        self._status = JobStatus(job_id=job_id)
        self._failed: str | None = None  # why workers that never connected cannot be used
        self._restarts: int | None = None  # of the job, before its workers connected
        self._running_since: float | None = None
        self._warned_for: float | None = 0.0  # unknown: sessions may have had notice from the server before this one
        self._suspended = False
        self._silent = ""  # what the last poll got instead of an answer of Slurm's controller
        self._changed = asyncio.Event()
        self._poll_now = asyncio.Event()
        self._asked = self._answered = 0  # polls that began, and that ended
        self._on_lost: OnLost = lambda mesh, host, reason: None
        self._on_ending: Callable[[JobEnd | None], None] = lambda end: None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    # --- HostProvider

    def meshes(self) -> Mapping[str, int]:
        return self._spec.meshes

    async def hosts(self, mesh: str) -> tuple[Host, ...]:
        """Waits for as long as the job is in the queue, and until it is known why workers have ended."""
        ranks = self._ranks[mesh]
        while True:
            known = [self.workers.by_rank.get(rank) for rank in ranks]
            found = [worker for worker in known if worker is not None]
            lost = {worker.host.name: worker.lost for worker in found if worker.lost is not None}
            name, why = next(iter(lost.items()), ("", ""))
            incomplete = f"mesh {mesh!r} is incomplete: {name}: {why}" if lost else ""
            if self._failed is not None or self._status.ended or len(lost) == len(ranks):
                raise HostsUnavailable(incomplete or self._failed or self._status.describe_end())
            if len(found) == len(ranks) and all(worker.connected or worker.lost for worker in found):
                hosts = tuple(worker.host for worker in found)
                if lost:
                    raise MeshIncomplete(incomplete, hosts, lost)
                return hosts
            await self._wait_changed()

    def present(self, mesh: str) -> Mapping[int, Host]:
        if self._status.ended:  # the workers end too, but not yet
            return {}
        ranks = self._ranks[mesh]
        workers = ((rank - ranks.start, self.workers.by_rank.get(rank)) for rank in ranks)
        return {rank: worker.host for rank, worker in workers if worker and worker.connected and worker.lost is None}

    def replaces_hosts(self, mesh: str) -> bool:
        return False

    def all_lost(self) -> bool:
        workers = self.workers.by_rank.values()
        starting = len(workers) < self._spec.nodes and self._failed is None
        return self._status.ended or not (starting or any(worker.lost is None for worker in workers))

    async def wait_ready(self) -> None:
        """Also returns when the job has ended."""
        while len(self.workers.by_rank) < self._spec.nodes and not self._status.ended and self._failed is None:
            await self._wait_changed()

    async def wait_ended(self) -> str:
        """Waits until Slurm has ended the job and the loss of its hosts is reported; returns why it ended."""
        while not self._status.ended:
            await self._wait_changed()
        return self._status.describe_end()

    def watch(self, on_lost: OnLost, on_restored: OnRestored) -> None:
        """Also begins to ask Slurm: the answers now have a reader."""
        self._on_lost = on_lost
        self._start(self._monitor())

    def watch_end(self, on_ending: Callable[[JobEnd | None], None]) -> None:
        """``on_ending`` is called when the end of the job is near, and with None when it is not any more."""
        self._on_ending = on_ending

    async def close(self) -> None:
        """Cancels the job."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        if not self._status.ended:
            try:
                await asyncio.to_thread(self._cluster.cancel)
                log.info("job cancelled", job=self._job_id)
            except (SlurmError, OSError, RuntimeError) as error:  # such as: no process or thread can be started
                log.warning("cannot cancel the job; it ends when its workers do", job=self._job_id, reason=str(error))
        await self.workers.close()

    def report(self) -> JobReport:
        """The job for its users."""
        workers = self.workers.by_rank.values()
        connected: dict[str, Any] = {"registered": len(workers), "ready": sum(worker.connected for worker in workers)}
        report = JobReport.of(self._status, self._spec.nodes, failed=self._failed)
        if self._silent and not report.ended:
            connected["why"] = f"when Slurm's controller last answered; now {self._silent}"
        return report.model_copy(update=connected)

    # --- the job's state

    async def _monitor(self) -> None:
        """Asks Slurm for the job until it has ended."""
        while not self._status.ended:
            self._poll_now.clear()
            self._asked += 1
            try:
                await self._poll()
                self._silent = ""
            except Exception as error:  # noqa: BLE001 - without a thread or a process, too: the next poll asks again
                self._silent = str(error).partition("\n")[0] if isinstance(error, Unanswered) else ""
                log.warning("cannot ask Slurm for the job", job=self._job_id, reason=str(error) or repr(error))
            self._answered = self._asked
            self._wake()
            if not self._status.ended:
                await _wait_event(self._poll_now, POLL_INTERVAL)

    async def _poll(self) -> None:
        signalled = [worker for worker in self.workers.by_rank.values() if worker.signalled]  # before Slurm is asked
        status = await asyncio.to_thread(self._cluster.status)
        if status is None:  # it ended longer ago than Slurm remembers
            status = self._status.model_copy(update={"state": UNKNOWN, "reason": ""})
        if status.state == "NODE_FAIL" and (node := status.batch_host):  # the loss of another does not end the job
            state = await asyncio.to_thread(self._node_state, node)
            status = status.model_copy(update={"node_problem": f"{node}{state}"})
        if self._restarts is None or not self.workers.by_rank:
            self._restarts = status.restarts
        if status.restarts > self._restarts and not status.ended:  # it would run again, for no one
            status = status.model_copy(update={"state": REQUEUED})
            with contextlib.suppress(SlurmError):
                await asyncio.to_thread(self._cluster.cancel)
        if status.state != self._status.state:
            log.info("job changed state", job=self._job_id, state=status.state, reason=status.reason)
        self._status = status
        self._warn_of_suspension(status)
        if status.state == "RUNNING":
            await self._check_running(status)
        elif status.ended:
            await self._job_ended()
        if status.ended or status.preempted_at is None:  # otherwise they continue for the grace time of the preemption
            for worker in list(self.workers.by_rank.values()) if status.ended else signalled:
                worker.end()

    async def _check_running(self, status: JobStatus) -> None:
        now = time.monotonic()
        if self._running_since is None:
            self._running_since = now
        self._warn_of_end(status)
        for worker in list(self.workers.by_rank.values()):
            if worker.lost is None and status.nodes and worker.host.name not in status.nodes:
                state = await asyncio.to_thread(self._node_state, worker.host.name)
                self._lose(worker, f"Slurm took node {worker.host.name} from job {self._job_id}{state}")
        if len(self.workers.by_rank) < self._spec.nodes and self._failed is None:
            await self._check_missing(now - self._running_since)

    async def _check_missing(self, seconds: float) -> None:
        """Gives up on workers that ended before they connected, or did not connect in time."""
        batch_log = await asyncio.to_thread(self._cluster.log_tail, None)
        ended = _TASK_ENDED.search(batch_log)
        if ended is not None and len(self.workers.by_rank) < self._spec.nodes:
            node = ended["nodes"].split(",")[0]
            tail = await asyncio.to_thread(self._log_tail, node if "[" not in node else None)
            self._failed = f"the worker on {ended['nodes']} ended before it was ready: {ended['what']}{tail}"
        elif seconds > WORKERS_TIMEOUT:
            connected = {worker.host.name for worker in self.workers.by_rank.values()}
            missing = ", ".join(node for node in self._status.nodes if node not in connected) or "some nodes"
            tail = await asyncio.to_thread(self._logs_of_missing)
            self._failed = f"the workers on {missing} did not connect within {WORKERS_TIMEOUT:g} s{tail}"
        if self._failed is not None:
            log.warning("workers missing", job=self._job_id, reason=self._failed)

    async def _job_ended(self) -> None:
        for worker in self.workers.by_rank.values():
            if worker.lost is None:
                tail = await asyncio.to_thread(self._log_tail, worker.host.name)
                self._lose(worker, f"{self._status.describe_end()}{tail}")
        if len(self.workers.by_rank) < self._spec.nodes and self._failed is None:
            tails = await asyncio.to_thread(self._logs_of_missing)
            unshared = await asyncio.to_thread(missing_log, self._status, self._cluster.batch_log)
            self._failed = f"{self._status.describe_end()}{unshared}{tails}"

    def _warn_of_end(self, status: JobStatus) -> None:
        """Gives notice of the time limit, and of a preemption with a grace time, which both set ``end_time``."""
        before = self._spec.warn_before
        why, what = "at its time limit", "its time limit"
        if status.preempted_at is not None:
            what = "a job of another partition or QOS takes its nodes"
            before, why = math.inf, f"because {what}"
        if status.end_time is None or before == 0 or self._warned_for == status.end_time:
            return
        left = status.end_time - time.time()
        if before is None:
            before = min(DEFAULT_WARN_BEFORE, 60 * (status.time_limit or math.inf) / 2)
        if 0 < left <= before:
            self._warned_for = status.end_time  # another end, as of a limit that is raised, brings another warning
            clock = time.strftime("%H:%M:%S", time.localtime(status.end_time))
            notice = f"Slurm ends job {self._job_id} at {clock}, in {_duration(left)}: {what}"
            self._on_ending(JobEnd(f"Slurm ends job {self._job_id} {why}", status.end_time, notice))
        elif self._warned_for is not None and left > 0:  # else Slurm is about to end it
            self._warned_for = None
            self._on_ending(None)

    def _warn_of_suspension(self, status: JobStatus) -> None:
        """Gives notice that the job's processes are stopped, and that they run again."""
        suspended = status.state == "SUSPENDED"
        if suspended == self._suspended or status.ended:
            return
        self._suspended = suspended
        if not suspended:
            self._warned_for = None  # an end that is near is announced again
            self._on_ending(None)
            return
        reason = f"Slurm has suspended job {self._job_id}"
        notice = (
            f"{reason}, as for a job that preempts it: its processes are stopped. Those that are stopped for longer "
            f"than {SUSPENSION_LIMIT:g} s fail; then spawn again once Slurm, or `scontrol resume {self._job_id}`, has "
            "resumed the job"
        )
        self._on_ending(JobEnd(reason, time.time() + SUSPENSION_LIMIT, notice))

    def _node_state(self, node: str) -> str:
        try:
            return f" ({self._cluster.node_state(node)})"
        except SlurmError as error:
            return f" (its state is unknown: {error})"

    def _log_tail(self, node: str | None) -> str:
        return last_lines(self._cluster.log_tail(node), f"the worker on {node}" if node else "the batch script")

    def _logs_of_missing(self) -> str:
        """The ends of the logs of the batch script and of one worker that did not connect."""
        connected = {worker.host.name for worker in self.workers.by_rank.values()}
        tails = (self._log_tail(node) for node in self._status.nodes if node not in connected)
        return self._log_tail(None) + next(filter(None, tails), "")

    # --- workers

    def _worker_signalled(self, worker: Worker) -> None:
        """It continues until Slurm has been asked why it got SIGTERM: see ``_poll``."""
        worker.signalled = True
        if self._closing or self._status.ended:  # Slurm is not asked any more
            worker.end()
        else:
            self._poll_now.set()

    def _worker_gone(self, worker: Worker) -> None:
        if not self._closing:
            self._start(self._explain_loss(worker))

    async def _explain_loss(self, worker: Worker) -> None:
        """Waits a moment for Slurm's reason, longer if it is slow to answer, then reports the loss."""
        loop = asyncio.get_running_loop()
        started, asked = loop.time(), self._asked  # whose answer may be from before the worker's end
        self._poll_now.set()  # once: a Slurm in trouble is asked no more often than otherwise
        while worker.lost is None and not self._status.ended:
            limit = REASON_TIMEOUT if self._answered > asked else ANSWER_TIMEOUT
            if (left := started + limit - loop.time()) <= 0:
                break
            await self._wait_changed(left)
        if worker.lost is None:
            tail = await asyncio.to_thread(self._log_tail, worker.host.name)
            why = f"the worker on this node ended, while Slurm job {self._job_id} runs"
            if self._status.ended:  # Slurm said so while the logs of the job's end were read, here or in _job_ended
                why = self._status.describe_end()
            self._lose(worker, f"{why}{tail}")

    def _lose(self, worker: Worker, reason: str) -> None:
        if worker.lost is not None:
            return
        self.workers.record_loss(worker, reason)
        self._wake()
        mesh = next(mesh for mesh, ranks in self._ranks.items() if worker.rank in ranks)
        log.warning("host lost", mesh=mesh, host=worker.host.name, reason=reason)
        self._on_lost(mesh, worker.host.name, reason)

    # --- waiting

    def _wake(self) -> None:
        """Wakes everything that waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_changed(self, timeout: float | None = None) -> None:
        await _wait_event(self._changed, timeout)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _shut_down(connection: asyncio.StreamWriter) -> None:
    """The other side then reads the end of the connection, also if another process has a copy of this side."""
    if not connection.is_closing():
        with contextlib.suppress(OSError):  # the other side has ended
            connection.write_eof()


async def _wait_event(event: asyncio.Event, timeout: float | None) -> None:
    try:
        async with async_timeout.timeout(timeout):
            await event.wait()
    except asyncio.TimeoutError:
        return


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
