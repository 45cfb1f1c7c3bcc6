"""One gateway from start to end: puts the parts together, and takes them apart in order.

Everything is started at once. It serves before its first engine and its hosts are up: who needs those waits for
them, and their start-up runs side by side. It ends on SIGTERM or SIGINT (a second one ends it at once), when its
lifetime descriptor reaches end of file, or when it has been idle for long enough; then nobody is let in, sessions
end, and no process that was started here is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from meshgate_gateway.auth import Authenticator, TokenAuthenticator
from meshgate_gateway.engines import Engine, EngineSupply
from meshgate_gateway.hosts import HostProvider, Hosts, StaticHosts
from meshgate_gateway.keeper import Keeper
from meshgate_gateway.local_hosts import LocalHosts
from meshgate_gateway.routes import Routes
from meshgate_gateway.server import LocalSocket, Server
from meshgate_gateway.sessions import Sessions
from meshgate_gateway.settings import Settings

if TYPE_CHECKING:
    from meshgate_gateway.kubernetes import InCluster
    from meshgate_gateway.provisioning import Provisioner

__all__ = ["Commands", "serve"]

log = structlog.get_logger()

COMING_UP = 3600.0  # seconds
HIDDEN = ("MESHGATE_TOKEN", "MESHGATE_TOKEN_FILE")
LET_GO = b"\n"  # on the lifetime descriptor: its end of file means nothing any more


@dataclass(frozen=True, slots=True)
class Commands:
    """What is run for an engine and for the reaper; tests run others."""

    engine: Sequence[str] = (sys.executable, "-m", "meshgate_gateway.engine")
    reap: Sequence[str] = (sys.executable, "-m", "meshgate_gateway.engine.reap")


async def serve(settings: Settings, listener: socket.socket, commands: Commands) -> None:
    """Serves until told to end; returns when everything that was started is gone."""
    loop = asyncio.get_running_loop()
    # User code runs in the engine and on the hosts; it has no business with the token.
    environment = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    supply = EngineSupply(lambda: Engine(commands.engine, environment), settings.warm_engines)
    supply.fill()
    cluster = await _cluster(settings)
    hosts = _hosts(settings, environment, cluster)
    sessions = Sessions(lease=settings.lease, limit=settings.max_sessions, now=loop.time())
    keeper = Keeper(sessions, supply, hosts, lease=settings.lease, reap_command=commands.reap, environment=environment)
    routes = Routes(_authenticator(settings, cluster), keeper, hosts)
    provisioner = await _provisioner(settings)
    routes.jobs = provisioner
    local = LocalSocket() if settings.local_socket else None
    server = Server([listener, local.listener] if local else [listener], routes.answer)
    accepting = asyncio.create_task(server.serve())
    url = _url(listener)
    _announce(settings.announce_fd, url, local)
    log.info("serving", url=url, pid=os.getpid(), meshes=hosts.meshes())

    end = await _wait_for_end(settings, keeper, hosts)
    log.info("ending", reason=end.reason)
    routes.draining = f"the gateway is ending: {end.reason}"
    accepting.cancel()
    if cluster is not None and end.idle:
        await cluster.end_job()
    try:
        if provisioner is not None:
            await provisioner.close()
        await keeper.close(routes.draining)
        await server.close()
    finally:
        await hosts.close()
        if local is not None:
            local.remove()
    log.info("ended", reason=end.reason)


@dataclass(frozen=True, slots=True)
class _End:
    """Why the gateway ends. ``idle``: of itself, because nobody has used it, so that its job ends with it."""

    reason: str
    idle: bool = False


async def _cluster(settings: Settings) -> InCluster | None:
    """The Kubernetes job that this is the gateway of, if it is one's."""
    if settings.kubernetes_job is None:
        return None
    from meshgate_gateway.kubernetes import InCluster  # noqa: PLC0415  (a fifth of a second that others save)

    return await asyncio.to_thread(InCluster.of_this_pod, settings.kubernetes_job)


async def _provisioner(settings: Settings) -> Provisioner | None:
    """What provisions jobs for others, if this gateway does."""
    if settings.provision_policy is None:
        return None
    from meshgate_gateway.kubernetes import provisioner  # noqa: PLC0415  (as above)

    return await provisioner(settings.provision_policy, TokenAuthenticator(settings.read_token()))


def _authenticator(settings: Settings, cluster: InCluster | None) -> Authenticator:
    token = TokenAuthenticator(settings.read_token())
    return token if cluster is None else cluster.authenticator(token)


def _hosts(settings: Settings, environment: dict[str, str], cluster: InCluster | None) -> HostProvider:
    providers: list[HostProvider] = [StaticHosts({mesh.name: mesh.addresses for mesh in settings.mesh})]
    if settings.local_mesh:
        providers.append(LocalHosts({mesh.name: mesh.count for mesh in settings.local_mesh}, environment))
    if cluster is not None:
        providers.append(cluster.hosts())
    return Hosts(providers)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"ws://[{host}]:{port}" if ":" in host else f"ws://{host}:{port}"


def _announce(descriptor: int | None, url: str, local: LocalSocket | None) -> None:
    if descriptor is not None:
        said = {"url": url, "pid": os.getpid(), **({"socket": local.path} if local else {})}
        with os.fdopen(descriptor, "w") as announcement:
            announcement.write(json.dumps(said) + "\n")


async def _wait_for_end(settings: Settings, keeper: Keeper, hosts: HostProvider) -> _End:
    """Why the gateway is to end, once it is."""
    end: asyncio.Future[_End] = asyncio.get_running_loop().create_future()
    _end_on_signals(end)
    if settings.lifetime_fd is not None:
        _end_with(settings.lifetime_fd, end)
    idle = asyncio.create_task(_wait_idle(keeper, hosts, settings.idle_timeout)) if settings.idle_timeout else None
    done, _ = await asyncio.wait([end, *([idle] if idle else [])], return_when=asyncio.FIRST_COMPLETED)
    if idle is not None:
        idle.cancel()
    return done.pop().result()


def _end_on_signals(end: asyncio.Future[_End]) -> None:
    loop = asyncio.get_running_loop()

    def on_signal(signum: signal.Signals) -> None:
        _settle(end, f"it received {signum.name}")
        # A second one ends this process at once; what was started here then ends by itself.
        loop.remove_signal_handler(signum)
        signal.signal(signum, signal.SIG_DFL)

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_signal, signum)


def _end_with(descriptor: int, end: asyncio.Future[_End]) -> None:
    """Ends at the descriptor's end of file, unless its other side has let go before."""
    loop = asyncio.get_running_loop()
    os.set_blocking(descriptor, False)

    def on_readable() -> None:
        try:
            said = os.read(descriptor, 1024)
        except BlockingIOError:
            return
        if not said:
            _settle(end, "the process that started it is gone")
        elif LET_GO not in said:
            return
        loop.remove_reader(descriptor)
        os.close(descriptor)

    loop.add_reader(descriptor, on_readable)


async def _wait_idle(keeper: Keeper, hosts: HostProvider, timeout: float) -> _End:
    """Idleness counts from when the hosts were there: whoever waits for them has no session yet. Hosts that never come
    hold it up for ``COMING_UP`` at most."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(hosts.came_up(), max(timeout, COMING_UP))
        began = loop.time()
    while True:
        keeper.changed.clear()
        since = keeper.idle_since
        left = None if since is None else max(since, began) + timeout - loop.time()
        if left is not None and left <= 0:
            return _End(f"it had no session for {timeout:g} s", idle=True)
        try:
            await asyncio.wait_for(keeper.changed.wait(), left)
        except asyncio.TimeoutError:
            continue


def _settle(end: asyncio.Future[_End], reason: str) -> None:
    if not end.done():
        end.set_result(_End(reason))
