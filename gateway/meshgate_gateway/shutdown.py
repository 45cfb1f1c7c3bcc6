"""Decides when the gateway shuts down: on a signal, with the process that started it, or when idle."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import async_timeout

JOB_END_GRACE = 2.0
HOSTS_TIMEOUT = 3600.0  # seconds for which missing hosts postpone an idle shutdown
DETACH = b"\n"  # written to the lifetime descriptor: its end of file no longer ends the gateway


class SessionActivity(Protocol):
    """Whether the gateway has sessions, or programs that run; the session manager is one."""

    @property
    def changed(self) -> asyncio.Event: ...

    @property
    def idle_since(self) -> float | None: ...


class Hosts(Protocol):
    """The hosts of all meshes."""

    async def wait_ready(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Why the gateway shuts down. ``idle``: it had no session for long enough, so its job ends too."""

    reason: str
    idle: bool = False


async def wait_for_shutdown(
    sessions: SessionActivity,
    hosts: Hosts,
    *,
    lifetime_fd: int | None,
    on_detach: Callable[[], None],
    idle_timeout: float,
    first_session: float = 0,
    hosts_timeout: float | None = HOSTS_TIMEOUT,
    job_end: Callable[[], Awaitable[str]] | None = None,
) -> Shutdown:
    """Waits for a reason to shut down. ``idle_timeout`` 0: never because of idleness; ``first_session``: see
    ``wait_idle``. ``on_detach`` is called if the process that started this gateway detaches it. ``hosts_timeout``: the
    seconds for which missing hosts postpone an idle shutdown, None for as long as they are missing. ``job_end`` waits
    for the end of the job in which this gateway runs, and returns the reason."""
    requested: asyncio.Future[Shutdown] = asyncio.get_running_loop().create_future()
    _watch_signals(requested)
    if lifetime_fd is not None:
        _watch_lifetime(lifetime_fd, requested, on_detach)
    others: list[asyncio.Task[Shutdown]] = []
    if idle_timeout:
        others.append(asyncio.create_task(wait_idle(sessions, hosts, idle_timeout, first_session, hosts_timeout)))
    if job_end is not None:
        others.append(asyncio.create_task(_wait_job_ended(job_end)))
    done, _ = await asyncio.wait([requested, *others], return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    return done.pop().result()


async def _wait_job_ended(job_end: Callable[[], Awaitable[str]]) -> Shutdown:
    reason = await job_end()
    await asyncio.sleep(JOB_END_GRACE)  # for sessions to report the losses of their hosts
    return Shutdown(reason)


def _watch_signals(requested: asyncio.Future[Shutdown]) -> None:
    loop = asyncio.get_running_loop()

    def on_signal(signum: signal.Signals) -> None:
        _request(requested, f"it received {signum.name}")
        # A second signal kills this process at once; its engines and hosts then end by themselves.
        loop.remove_signal_handler(signum)
        signal.signal(signum, signal.SIG_DFL)

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_signal, signum)


def _watch_lifetime(descriptor: int, requested: asyncio.Future[Shutdown], on_detach: Callable[[], None]) -> None:
    """Requests the shutdown at the descriptor's end of file, unless ``DETACH`` arrives first."""
    loop = asyncio.get_running_loop()
    os.set_blocking(descriptor, False)

    def on_readable() -> None:
        try:
            data = os.read(descriptor, 1024)
        except BlockingIOError:
            return
        if not data:
            _request(requested, "the process that started it has exited")
        elif DETACH in data:
            on_detach()
        else:
            return
        loop.remove_reader(descriptor)
        os.close(descriptor)

    loop.add_reader(descriptor, on_readable)


def _request(requested: asyncio.Future[Shutdown], reason: str) -> None:
    if not requested.done():
        requested.set_result(Shutdown(reason))


async def wait_idle(
    sessions: SessionActivity,
    hosts: Hosts,
    timeout: float,
    first_session: float = 0,
    hosts_timeout: float | None = HOSTS_TIMEOUT,
) -> Shutdown:
    """Waits until there has been no session for ``timeout`` seconds, or for ``first_session`` if that is longer and
    there has never been one: the program that started this gateway has yet to notice that it is ready.

    The time counts from when all hosts were ready, because a client that waits for them has no session yet. Hosts that
    never become ready postpone it by at most ``hosts_timeout``.
    """
    loop = asyncio.get_running_loop()
    unused_since = sessions.idle_since
    ready_at = loop.time()
    with contextlib.suppress(asyncio.TimeoutError):
        async with async_timeout.timeout(hosts_timeout and max(timeout, hosts_timeout)):
            await hosts.wait_ready()
        ready_at = loop.time()
    while True:
        sessions.changed.clear()
        idle_since = sessions.idle_since
        allowed = max(timeout, first_session) if idle_since == unused_since else timeout
        remaining = None if idle_since is None else max(idle_since, ready_at) + allowed - loop.time()
        if remaining is not None and remaining <= 0:
            return Shutdown(f"it had no session for {allowed:g} s", idle=True)
        try:
            async with async_timeout.timeout(remaining):
                await sessions.changed.wait()
        except asyncio.TimeoutError:
            continue
