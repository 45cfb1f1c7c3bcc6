"""Jobs on their way up that somebody waits for, over connections that may be cut.

An ingress may end any connection, some after 30 s whatever passes on it. Who asked for a job then dials again and asks
the same, and finds it where it is by now. A job is not made for nobody, though: when its caller says goodbye, or does
not come back for a while, what there is of it goes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import structlog

from meshgate_gateway.conversation import Conversation
from meshgate_kubernetes.errors import KubernetesError
from meshgate_kubernetes.jobs import RunningJob
from meshgate_kubernetes.readiness import Listener, Progress
from meshgate_kubernetes.requests import Answer, Created, Refused, Told, Up, refused
from meshgate_kubernetes.spec import Object

__all__ = ["Making", "Makings"]

log = structlog.get_logger()

MAX_AT_ONCE = 64
RETURN_TIME = 20.0
CLOSE_TIMEOUT = 10.0
TELL_TIMEOUT = 60.0

Make = Callable[[Listener], RunningJob]
End = Callable[[RunningJob], None]
Key = tuple[str, str]
"""Who asked, and for what."""


class Makings:
    """The jobs that are being made, each for one caller, by what was asked."""

    def __init__(self, end: End) -> None:
        """``end`` ends a job that is up and that nobody has been told of. Blocks, raises KubernetesError."""
        self._end = end
        self._under_way: dict[Key, Making] = {}
        # Threads of their own: each waits for as long as a cluster takes, and others must get in meanwhile.
        self._threads = ThreadPoolExecutor(MAX_AT_ONCE, thread_name_prefix="meshgate-making")

    def of(self, key: Key, make: Make) -> Making:
        """The one of this key, begun by ``make`` on a thread if there is none."""
        making = self._under_way.get(key)
        if making is None:
            making = self._under_way[key] = Making(self._threads, make, self._end, lambda: self._forget(key))
        return making

    def _forget(self, key: Key) -> None:
        self._under_way.pop(key, None)

    async def close(self) -> None:
        """Abandons what is under way, and waits for a moment until it is gone."""
        if going := [making.abandon() for making in list(self._under_way.values())]:
            await asyncio.wait(going, timeout=CLOSE_TIMEOUT)
        self._threads.shutdown(wait=False, cancel_futures=True)


class Making:
    """One job, and the conversations that wait for it. A Listener, on the thread that makes it."""

    def __init__(self, threads: ThreadPoolExecutor, make: Make, end: End, forget: Callable[[], None]) -> None:
        """``forget`` is called once, when nobody else may join."""
        self._threads, self._end, self._forget = threads, end, forget
        self._loop = asyncio.get_running_loop()
        self._callers: set[Conversation] = set()
        self._told = False
        self._return: asyncio.TimerHandle | None = None
        self._going: asyncio.Task[None] | None = None
        self._task = asyncio.create_task(self._run(make))

    async def attend(self, caller: Conversation) -> None:
        """Tells ``caller`` how it goes and what has become of it; returns when that is told, or the caller left."""
        if self._return is not None:
            self._return.cancel()
        self._callers.add(caller)
        leaving = asyncio.create_task(caller.wait_over())
        try:
            await asyncio.wait([self._task, leaving], return_when=asyncio.FIRST_COMPLETED)
            if self._task.done() and await caller.send(self._task.result().model_dump_json()):
                self._tell_done()
        finally:
            leaving.cancel()
            self._callers.discard(caller)
            if not self._callers and not self._told:
                self._return = self._loop.call_later(0 if caller.said_goodbye else RETURN_TIME, self.abandon)

    def abandon(self) -> asyncio.Task[None]:
        """Nobody wants it any more. The task is done when what was made of it is gone."""
        if self._going is None:
            self._tell_done()
            self._going = asyncio.create_task(self._go())
        return self._going

    def _tell_done(self) -> None:
        if not self._told:
            self._told = True
            self._forget()

    async def _go(self) -> None:
        answer = await self._task  # which the next thing that is to be told ends
        if isinstance(answer, Up):
            try:
                await self._loop.run_in_executor(self._threads, self._end, answer.job)
            except KubernetesError as error:
                log.warning("a job that nobody waits for could not be ended", job=answer.job.name, reason=str(error))

    async def _run(self, make: Make) -> Answer:
        try:
            return Up(job=await self._loop.run_in_executor(self._threads, make, self))
        except KubernetesError as error:
            return refused(error)
        except Exception as fault:
            log.exception("a job could not be made")
            return Refused(reason=f"the gateway failed inside: {fault!r}. Please report this.")

    # --- on the thread that makes it ----------------------------------------------------------------------

    def created(self, obj: Object) -> None:
        self._tell(Created(kind=obj["kind"], name=obj["metadata"]["name"]))

    def progress(self, progress: Progress) -> None:
        self._tell(Told(progress=progress))

    def _tell(self, answer: Answer) -> None:
        if self._going is not None:
            raise KubernetesError("whoever asked for the job has gone")
        asyncio.run_coroutine_threadsafe(self._tell_all(answer.model_dump_json()), self._loop).result(TELL_TIMEOUT)

    async def _tell_all(self, text: str) -> None:
        for caller in list(self._callers):
            await caller.send(text)
