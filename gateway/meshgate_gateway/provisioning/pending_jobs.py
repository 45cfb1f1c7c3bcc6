"""Jobs that are starting, and the callers that wait for them over connections that may be cut.

An ingress may close any connection, some after 30 s regardless of traffic. The caller then reconnects, repeats its
request and follows the job from its current state. If the caller closes its websocket, or does not return in time, the
job is deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import structlog

from meshgate_gateway.http.text_websocket import TextWebSocket
from meshgate_kubernetes.errors import KubernetesError
from meshgate_kubernetes.jobs.lifecycle import RunningJob
from meshgate_kubernetes.jobs.provisioning_messages import (
    JobProgress,
    JobUp,
    ObjectCreated,
    ProvisioningReply,
    RequestRejected,
    encode_reply,
    rejection,
)
from meshgate_kubernetes.manifests.spec import Object
from meshgate_kubernetes.status.readiness import Progress, ProgressListener

log = structlog.get_logger()

MAX_THREADS = 64
RECONNECT_TIMEOUT = 20.0
CLOSE_TIMEOUT = 10.0
SEND_TIMEOUT = 60.0

StartJob = Callable[[ProgressListener], RunningJob]
EndJob = Callable[[RunningJob], None]
Key = tuple[str, str]
"""The caller and its request."""


class PendingJobs:
    """The jobs that are starting, one for each caller and request."""

    def __init__(self, end: EndJob) -> None:
        """``end`` ends a job whose caller has gone. It blocks and raises KubernetesError."""
        self._end = end
        self._jobs: dict[Key, PendingJob] = {}
        # Separate threads: each blocks for as long as a job takes to start, and other requests must not wait for it.
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="meshgate-start-job")

    def get_or_start(self, key: Key, start: StartJob) -> PendingJob:
        """The pending job for ``key``; if there is none, starts one by ``start`` on a thread."""
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = PendingJob(self._threads, start, self._end, lambda: self._remove(key))
        return job

    def _remove(self, key: Key) -> None:
        self._jobs.pop(key, None)

    async def close(self) -> None:
        """Abandons all pending jobs and waits up to ``CLOSE_TIMEOUT`` seconds for their deletion."""
        if deleting := [job.abandon() for job in list(self._jobs.values())]:
            await asyncio.wait(deleting, timeout=CLOSE_TIMEOUT)
        self._threads.shutdown(wait=False, cancel_futures=True)


class PendingJob:
    """One starting job and the connections that follow it. A ProgressListener on the thread that starts the job."""

    def __init__(
        self, threads: ThreadPoolExecutor, start: StartJob, end: EndJob, on_settled: Callable[[], None]
    ) -> None:
        """``on_settled`` is called once, when no further connection may follow the job."""
        self._threads, self._end, self._on_settled = threads, end, on_settled
        self._loop = asyncio.get_running_loop()
        self._connections: set[TextWebSocket] = set()
        self._settled = False
        self._abandon_timer: asyncio.TimerHandle | None = None
        self._deleting: asyncio.Task[None] | None = None
        self._starting = asyncio.create_task(self._start(start))

    async def follow(self, connection: TextWebSocket) -> None:
        """Reports progress and the result over ``connection``; returns once the result is sent or the caller has
        disconnected."""
        if self._abandon_timer is not None:
            self._abandon_timer.cancel()
        self._connections.add(connection)
        disconnected = asyncio.create_task(connection.wait_closed())
        try:
            await asyncio.wait([self._starting, disconnected], return_when=asyncio.FIRST_COMPLETED)
            if self._starting.done() and await connection.send(encode_reply(self._starting.result())):
                self._settle()
        finally:
            disconnected.cancel()
            self._connections.discard(connection)
            if not self._connections and not self._settled:
                delay = 0 if connection.closed_by_peer else RECONNECT_TIMEOUT
                self._abandon_timer = self._loop.call_later(delay, self.abandon)

    def abandon(self) -> asyncio.Task[None]:
        """Deletes the job. The returned task is done once nothing of it is left."""
        if self._deleting is None:
            self._settle()
            self._deleting = asyncio.create_task(self._delete())
        return self._deleting

    def _settle(self) -> None:
        if not self._settled:
            self._settled = True
            self._on_settled()

    async def _delete(self) -> None:
        reply = await self._starting  # the next progress report aborts it
        if isinstance(reply, JobUp):
            try:
                await self._loop.run_in_executor(self._threads, self._end, reply.job)
            except KubernetesError as error:
                log.warning("cannot delete an abandoned job", job=reply.job.name, reason=str(error))

    async def _start(self, start: StartJob) -> ProvisioningReply:
        try:
            return JobUp(job=await self._loop.run_in_executor(self._threads, start, self))
        except KubernetesError as error:
            return rejection(error)
        except Exception as fault:
            log.exception("cannot start a job")
            return RequestRejected(reason=f"internal error in the gateway: {fault!r}; please report it as a bug")

    # --- on the thread that starts the job ----------------------------------------------------------------

    def created(self, obj: Object) -> None:
        self._report(ObjectCreated(kind=obj["kind"], name=obj["metadata"]["name"]))

    def progress(self, progress: Progress) -> None:
        self._report(JobProgress(progress=progress))

    def _report(self, reply: ProvisioningReply) -> None:
        if self._deleting is not None:
            raise KubernetesError("the caller has disconnected")
        asyncio.run_coroutine_threadsafe(self._send(encode_reply(reply)), self._loop).result(SEND_TIMEOUT)

    async def _send(self, text: str) -> None:
        for connection in list(self._connections):
            await connection.send(text)
