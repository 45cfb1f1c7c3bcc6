"""One gateway from start to end: connects the parts, and closes them in order.

Everything starts at once: the gateway serves requests before its first engine and its hosts are up, and requests that
need those wait for them. It shuts down on a signal, with the process that started it, or when idle. Then it rejects
new connections, ends the sessions and leaves no process behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol

import async_timeout
from pydantic import SecretStr

from meshgate_gateway.hosts.local import LocalHosts
from meshgate_gateway.hosts.provider import CombinedHosts, HostProvider, StaticHosts
from meshgate_gateway.http.auth import Authenticator, GatewaysAuthenticator, TokenAuthenticator
from meshgate_gateway.http.forwarding import Address, Forwarder
from meshgate_gateway.http.routes import Routes
from meshgate_gateway.http.server import LocalSocket, Server, listen
from meshgate_gateway.logs import EventLog
from meshgate_gateway.runs import service as runs
from meshgate_gateway.sessions.engine_processes import ENGINE_KEY, EnginePool, EngineProcess
from meshgate_gateway.sessions.session_manager import EndedSessions, SessionManager
from meshgate_gateway.sessions.session_table import Sessions
from meshgate_gateway.settings import OF_JOB, Settings
from meshgate_gateway.supervisor.link import SupervisorLink
from meshgate_wire.proof import engines_key, gateway_name

if TYPE_CHECKING:
    from meshgate_gateway.hosts.slurm import SlurmHosts
    from meshgate_gateway.http.metrics import Metrics
    from meshgate_gateway.in_cluster import ClusterJob
    from meshgate_gateway.on_slurm import SlurmError, SlurmJob
    from meshgate_gateway.provisioning.service import Provisioner
    from meshgate_gateway.provisioning.slurm_service import SlurmProvisioner

log = EventLog()

SECRET_VARIABLES = ("MESHGATE_TOKEN", "MESHGATE_TOKEN_FILE")
LOCAL_SOCKET = "local socket"  # the keys of what the supervisor keeps
STANDARD_OUTPUT = 1
DETACHED = "detached from the process that started it"
DETACH = b"\n"  # written to the lifetime descriptor: its end of file no longer ends the gateway
JOB_END_GRACE = 2.0
AFTER_JOB_END = 1800.0  # seconds after its last session until a gateway without a job ends, whatever idle_timeout is
NOT_AWAITED = "the program that started it has not waited for it"  # and knows no job that it could end
HOSTS_TIMEOUT = 3600.0  # seconds for which missing hosts postpone an idle shutdown


@dataclass(frozen=True, slots=True)
class Commands:
    """The commands that start an engine and the reaper. Tests replace them."""

    engine: Sequence[str] = (sys.executable, "-m", "meshgate_gateway.engine")
    reap: Sequence[str] = (sys.executable, "-m", "meshgate_gateway.engine.reap_orphans")


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a gateway consists of. ``cluster`` is the Kubernetes job that it belongs to, ``slurm`` the Slurm job that it
    submits, with its hosts in ``nodes``."""

    engines: EnginePool
    sessions: SessionManager
    hosts: HostProvider
    cluster: ClusterJob | None
    slurm: SlurmJob | None
    nodes: SlurmHosts | None
    provisioner: Provisioner | SlurmProvisioner | None
    routes: Routes
    runs: runs.Service
    servers: Sequence[Server]
    local: LocalSocket | None


@dataclass(frozen=True, slots=True)
class _Activity:
    """What keeps the gateway from being idle: sessions, and runs that have not ended."""

    sessions: SessionManager
    runs: runs.Service

    @property
    def changed(self) -> asyncio.Event:
        return self.sessions.changed  # the runs set it too

    @property
    def idle_since(self) -> float | None:
        since = self.sessions.idle_since
        if since is None or self.runs.live:
            return None
        return since if self.runs.idle_since is None else max(since, self.runs.idle_since)


async def serve(settings: Settings, listener: socket.socket, commands: Commands, supervisor: SupervisorLink) -> None:
    """Serves until shutdown; returns when everything it started is gone."""
    supervisor.watch()
    requested: asyncio.Future[Shutdown] = asyncio.get_running_loop().create_future()
    if settings.forward_to is not None:
        await _serve_forwarding(settings, listener, supervisor, requested)
        return
    if settings.slurm_job is not None:
        _watch_signals(requested)  # already now: a job that sbatch is submitting must be known before it is cancelled
    parts = await _assemble(settings, listener, commands, supervisor)
    if settings.slurm_job is None:
        _watch_signals(requested)
    accepting = [asyncio.create_task(server.serve()) for server in parts.servers]
    announced = _announce(settings, listener, supervisor, parts.local, parts.slurm)
    log.info("serving", url=_url(listener), pid=os.getpid(), meshes=parts.hosts.meshes())

    shutdown = Shutdown(NOT_AWAITED)
    if announced:
        shutdown = await _wait_for_shutdown(parts, settings, supervisor, requested)
    log.info("shutting down", reason=shutdown.reason)
    parts.routes.draining = f"the gateway is shutting down: {shutdown.reason}"
    for task in accepting:
        task.cancel()
    if parts.cluster is not None and shutdown.idle:
        await parts.cluster.delete()
    await _close(parts, parts.routes.draining)
    log.info("shut down", reason=shutdown.reason)


async def _serve_forwarding(
    settings: Settings, listener: socket.socket, supervisor: SupervisorLink, requested: asyncio.Future[Shutdown]
) -> None:
    """Serves without sessions, in front of the engines."""
    _watch_signals(requested)
    forwarder, name = await _forwarder(settings)
    server = Server([listener], forwarder.respond, name=name)
    accepting = asyncio.create_task(server.serve())
    announced = _announce(settings, listener, supervisor)
    log.info("serving", url=_url(listener), pid=os.getpid(), forwards_to=settings.forward_to)
    if announced and settings.lifetime_fd is not None and DETACHED not in supervisor.kept:
        _watch_lifetime(settings.lifetime_fd, requested, lambda: supervisor.keep(DETACHED, {}))
    shutdown = await requested if announced else Shutdown(NOT_AWAITED)
    log.info("shutting down", reason=shutdown.reason)
    accepting.cancel()
    await server.close()  # connections that are forwarded end with the event loop: their clients dial another gateway


async def _forwarder(settings: Settings) -> tuple[Forwarder, str]:
    """With the name of the gateway in proofs, which is that of the engines' server: clients see one gateway."""
    token = settings.read_token()
    key = engines_key(token.get_secret_value())
    authenticator = TokenAuthenticator(token)
    if settings.forward_to == OF_JOB:
        assert settings.kubernetes_job is not None
        from meshgate_gateway.in_cluster import EnginesOfJob  # noqa: PLC0415  (as for other gateways of a cluster)

        engines = await asyncio.to_thread(EnginesOfJob.of_this_namespace, settings.kubernetes_job)
        of_cluster = engines.authenticator(authenticator)
        return Forwarder(of_cluster, SecretStr(key), engines.find, engines.name), gateway_name(key)
    address = settings.forwarding_address()

    async def find() -> Address:
        return address

    return Forwarder(authenticator, SecretStr(key), find, {}), gateway_name(key)


async def _assemble(
    settings: Settings, listener: socket.socket, commands: Commands, supervisor: SupervisorLink
) -> _Parts:
    """Starts everything but the servers, and connects it."""
    # Engines and hosts run user code, which must not see the token.
    environment = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
    if settings.remove_at_end is not None and settings.remove_at_end.is_dir():
        environment["TMPDIR"] = str(settings.remove_at_end)
    slurm = await _slurm_job(settings, supervisor)
    if slurm is not None:
        environment["MESHGATE_ENGINE_HOST"] = slurm.address
    inherited = _inherited_engines(supervisor)
    engines = _engine_pool(settings, commands, environment, supervisor)
    engines.adopt(engine for engine in inherited if engine.session is None)
    engines.fill()
    # Most programs use one session, and a further engine costs them a second of processor time and 80 MB.
    engines.refills = settings.lifetime_fd is None or DETACHED in supervisor.kept
    cluster = await _cluster(settings, supervisor)
    nodes = None if slurm is None else await _submit(slurm, settings, engines)
    pods = None if cluster is None else cluster.hosts()
    hosts = _hosts(settings, environment, pods or nodes, supervisor)
    sessions = _sessions(settings, engines, hosts, commands, environment, supervisor)
    for engine in inherited:
        if engine.session is not None:
            sessions.adopt(engine, engine.session)
    provisioner = await _provisioner(settings)
    metrics = functools.cache(lambda: _metrics(sessions, hosts))
    name = gateway_name(settings.read_token().get_secret_value())
    routes = Routes(_authenticator(settings, cluster), sessions, hosts, metrics, provisioner, name=name)
    if cluster is not None and pods is not None:
        routes.restart_reason, routes.job, routes.job_facts = cluster.restart_reason, cluster.name, cluster.facts
        routes.read_sizes = functools.partial(cluster.read_sizes, pods)
        pods.watch_endings(sessions.host_ending)
        pods.watch_removals(functools.partial(sessions.host_lost, removed=True))
    if nodes is not None:
        nodes.watch_end(sessions.job_ending)
        routes.job_facts = lambda: {"slurm": nodes.report().model_dump(mode="json")}
    local = _local_socket(supervisor) if settings.local_socket else None
    place = _place_of_runs(settings, environment, listener, local, hosts)
    routes.runs = service = runs.Service(place, supervisor, sessions.changed, sessions.run_ended, routes.job)
    server = Server([listener, local.listener] if local else [listener], routes.respond, name=name)
    servers = [server, *_metrics_server(settings, metrics)]
    return _Parts(engines, sessions, hosts, cluster, slurm, nodes, provisioner, routes, service, servers, local)


async def _wait_for_shutdown(
    parts: _Parts, settings: Settings, supervisor: SupervisorLink, requested: asyncio.Future[Shutdown]
) -> Shutdown:
    slurm, nodes = parts.slurm, parts.nodes

    def on_detach() -> None:
        supervisor.keep(DETACHED, {})
        parts.engines.refills = True
        parts.engines.fill()

    return await wait_for_shutdown(
        _Activity(parts.sessions, parts.runs),
        parts.hosts,
        requested,
        lifetime_fd=None if DETACHED in supervisor.kept else settings.lifetime_fd,
        on_detach=on_detach,
        idle_timeout=settings.idle_timeout,
        first_session=settings.first_session,
        job_end=nodes.wait_ended if nodes is not None else None,
        outlives_job=slurm is not None and not slurm.within,
        hosts_timeout=None if slurm is not None else HOSTS_TIMEOUT,  # a job may be in the queue for days
    )


async def _close(parts: _Parts, reason: str) -> None:
    """Ends the sessions with ``reason``, then the servers and, whatever fails before, the hosts."""
    try:
        if parts.provisioner is not None:
            await parts.provisioner.close()
        await parts.runs.close()
        await parts.sessions.close(reason)
        await asyncio.gather(*(server.close() for server in parts.servers))
    finally:
        await parts.hosts.close()
        if parts.local is not None:
            parts.local.remove()


async def _cluster(settings: Settings, supervisor: SupervisorLink) -> ClusterJob | None:
    """The Kubernetes job that this gateway belongs to, if any."""
    if settings.kubernetes_job is None:
        return None
    from meshgate_gateway.in_cluster import ClusterJob  # noqa: PLC0415  (takes 0.2 s, and other gateways do not need it)

    return await asyncio.to_thread(ClusterJob.of_this_pod, settings.kubernetes_job, supervisor)


async def _slurm_job(settings: Settings, supervisor: SupervisorLink) -> SlurmJob | None:
    """The Slurm job that this gateway submits, or has submitted, if any."""
    if settings.slurm_job is None:
        return None
    from meshgate_gateway.on_slurm import SlurmError, SlurmJob  # noqa: PLC0415  (only these gateways need it)

    try:
        return await asyncio.to_thread(SlurmJob.find, settings.slurm_job, supervisor)
    except SlurmError as error:
        _refuse(settings.announce_fd, error)


async def _submit(job: SlurmJob, settings: Settings, engines: EnginePool) -> SlurmHosts:
    from meshgate_gateway.on_slurm import SlurmError  # noqa: PLC0415  (as above)

    try:
        return await job.hosts()
    except SlurmError as error:
        await engines.close()
        _refuse(settings.announce_fd, error)


async def _provisioner(settings: Settings) -> Provisioner | SlurmProvisioner | None:
    """The service that creates jobs for other callers, if this gateway offers it."""
    if settings.slurm_policy is not None:
        from meshgate_gateway.provisioning.slurm_service import create_slurm_provisioner  # noqa: PLC0415  (as above)

        try:
            return create_slurm_provisioner(settings.slurm_policy, TokenAuthenticator(settings.read_token()))
        except (ValueError, OSError) as error:
            raise SystemExit(f"meshgate_gateway: {error}") from None
    if settings.provision_policy is None:
        return None
    from meshgate_gateway.in_cluster import create_provisioner  # noqa: PLC0415  (as above)

    return await create_provisioner(settings.provision_policy, TokenAuthenticator(settings.read_token()))


def _authenticator(settings: Settings, cluster: ClusterJob | None) -> Authenticator:
    if settings.behind_gateways:
        return GatewaysAuthenticator(settings.read_token())
    token = TokenAuthenticator(settings.read_token())
    return token if cluster is None else cluster.authenticator(token)


def _engine_pool(
    settings: Settings, commands: Commands, environment: dict[str, str], supervisor: SupervisorLink
) -> EnginePool:
    output = STANDARD_OUTPUT if settings.log_output else None
    return EnginePool(
        lambda: EngineProcess.start(supervisor, commands.engine, environment, output), settings.warm_engines
    )


def _inherited_engines(supervisor: SupervisorLink) -> list[EngineProcess]:
    return [EngineProcess.adopt(process) for key, process in supervisor.children.items() if key.startswith(ENGINE_KEY)]


def _sessions(
    settings: Settings,
    engines: EnginePool,
    hosts: HostProvider,
    commands: Commands,
    environment: dict[str, str],
    supervisor: SupervisorLink,
) -> SessionManager:
    now = asyncio.get_running_loop().time()
    return SessionManager(
        Sessions(lease=settings.lease, limit=settings.max_sessions, now=now),
        engines,
        hosts,
        lease=settings.lease,
        reap_command=commands.reap,
        environment=environment,
        ended=EndedSessions(supervisor),
    )


def _hosts(
    settings: Settings,
    environment: dict[str, str],
    of_cluster: HostProvider | None,
    supervisor: SupervisorLink,
) -> HostProvider:
    providers: list[HostProvider] = [StaticHosts({mesh.name: mesh.addresses for mesh in settings.mesh})]
    if settings.local_mesh:
        providers.append(LocalHosts({mesh.name: mesh.count for mesh in settings.local_mesh}, environment, supervisor))
    if of_cluster is not None:
        providers.append(of_cluster)
    return CombinedHosts(providers)


def _place_of_runs(
    settings: Settings,
    environment: Mapping[str, str],
    listener: socket.socket,
    local: LocalSocket | None,
    hosts: HostProvider,
) -> runs.Place:
    url = _url(listener).replace("://0.0.0.0:", "://127.0.0.1:").replace("://[::]:", "://[::1]:")
    variables = {"MESHGATE_RUN_URL": url}
    if local is not None:
        variables["MESHGATE_RUN_SOCKET"] = local.path
    # A program may start a gateway, or be a driver of another one: this one's settings are not for it.
    set_aside = ("MESHGATE_URL", "KT_API_URL", *(f"MESHGATE_{name.upper()}" for name in Settings.model_fields))
    refusal = "" if settings.runs else "this gateway runs no programs (--no-runs): run yours where your driver runs"
    if settings.provision_policy is not None or settings.slurm_policy is not None:  # it has the rights of its operator
        refusal = "this gateway starts jobs for others and runs no programs itself: submit yours to a job"
    return runs.Place(environment, variables, hosts.meshes, set_aside, refusal)


def _metrics(sessions: SessionManager, hosts: HostProvider) -> Metrics:
    from meshgate_gateway.http.metrics import Metrics  # noqa: PLC0415  (most local gateways never need it)

    return Metrics(sessions, hosts)


def _metrics_server(settings: Settings, metrics: Callable[[], Metrics]) -> list[Server]:
    """The server of ``--metrics-port``, if there is one."""
    if settings.metrics_port is None:
        return []
    try:
        listener = listen(settings.host, settings.metrics_port)
    except OSError as error:
        at = f"{settings.host}:{settings.metrics_port}"
        reason = f"cannot listen on {at}: {error.strerror or error}; choose another --metrics-port"
        raise SystemExit(f"meshgate_gateway: {reason}") from None
    return [Server([listener], metrics().respond)]


def _local_socket(supervisor: SupervisorLink) -> LocalSocket:
    if inherited := supervisor.kept.get(LOCAL_SOCKET):
        return LocalSocket.adopt(inherited.note["path"], inherited.descriptors[0])
    local = LocalSocket.create()
    supervisor.keep(LOCAL_SOCKET, {"path": local.path}, [local.listener.fileno()])
    return local


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"ws://[{host}]:{port}" if ":" in host else f"ws://{host}:{port}"


def _announce(
    settings: Settings,
    listener: socket.socket,
    supervisor: SupervisorLink,
    local: LocalSocket | None = None,
    slurm: SlurmJob | None = None,
) -> bool:
    """Says that this server serves. Returns whether the program that started this gateway still waits for it."""
    supervisor.serving()
    if supervisor.predecessor is not None:
        log.warning("the server was replaced", predecessor=supervisor.predecessor)
        return True
    facts: dict[str, object] = {"url": _url(listener), "pid": supervisor.supervisor_pid}
    if local is not None:
        facts["socket"] = local.path
    if slurm is not None:
        facts |= {"job_id": slurm.job_id, "log_dir": slurm.log_dir}
    try:
        _write_line(settings.announce_fd, facts)
    except BrokenPipeError:
        return False
    return True


def _refuse(descriptor: int | None, reason: SlurmError) -> NoReturn:
    """Ends the gateway because Slurm does not take its job."""
    from meshgate_gateway.on_slurm import Unanswered  # noqa: PLC0415  (as above)

    _write_line(descriptor, {"error": str(reason), "silent": isinstance(reason, Unanswered)})
    raise SystemExit(f"meshgate_gateway: {reason}")


def _write_line(descriptor: int | None, facts: dict[str, object]) -> None:
    if descriptor is not None:
        with os.fdopen(descriptor, "w") as announcement:
            announcement.write(json.dumps(facts) + "\n")


class SessionActivity(Protocol):
    """Whether the gateway has sessions, or programs that run; the session manager is one."""

    @property
    def changed(self) -> asyncio.Event: ...

    @property
    def idle_since(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Why the gateway shuts down. ``idle``: it had no session for long enough, so its job ends too."""

    reason: str
    idle: bool = False


async def wait_for_shutdown(
    sessions: SessionActivity,
    hosts: HostProvider,
    requested: asyncio.Future[Shutdown],
    *,
    lifetime_fd: int | None,
    on_detach: Callable[[], None],
    idle_timeout: float,
    first_session: float = 0,
    hosts_timeout: float | None = HOSTS_TIMEOUT,
    job_end: Callable[[], Awaitable[str]] | None = None,
    outlives_job: bool = False,
) -> Shutdown:
    """Waits for a reason to shut down, such as ``requested``. ``idle_timeout`` 0: never because of idleness;
    ``first_session``: see ``wait_idle``. ``on_detach`` is called if the process that started this gateway detaches it.
    ``hosts_timeout``: the seconds for which missing hosts postpone an idle shutdown, None for as long as they are
    missing. ``job_end`` waits for the end of this gateway's Slurm job, and returns the reason. A gateway that
    ``outlives_job`` then serves its sessions to their end, and answers for a while."""
    if lifetime_fd is not None:
        _watch_lifetime(lifetime_fd, requested, on_detach)
    others: list[asyncio.Task[Shutdown]] = []
    if idle_timeout:
        others.append(asyncio.create_task(wait_idle(sessions, hosts, idle_timeout, first_session, hosts_timeout)))
    if job_end is not None:
        unused = functools.partial(wait_idle, sessions, hosts, AFTER_JOB_END) if outlives_job else None
        others.append(asyncio.create_task(_wait_job_ended(job_end, unused)))
    done, _ = await asyncio.wait([requested, *others], return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    return done.pop().result()


async def _wait_job_ended(
    job_end: Callable[[], Awaitable[str]], unused: Callable[[], Awaitable[Shutdown]] | None
) -> Shutdown:
    reason = await job_end()
    await asyncio.sleep(JOB_END_GRACE)  # for sessions to report the losses of their hosts
    if unused is not None:
        await unused()
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
    hosts: HostProvider,
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
