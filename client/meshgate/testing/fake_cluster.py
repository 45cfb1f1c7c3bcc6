"""A gateway that runs actor classes in threads of the test's process."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn

import cloudpickle

from meshgate.shapes.shape import Extent, Point, Region
from meshgate.testing.fake_process import FakeProcess, Message, unpickle
from meshgate.testing.pending_call import FakeMesh, PendingCall
from meshgate.testing.wire_server import ServerSession, WireServer
from meshgate_wire import Fragments
from meshgate_wire.messages import (
    Adopt,
    Argument,
    AttachHosts,
    Call,
    ConfigureMonarch,
    Done,
    EndSession,
    Failed,
    Failure,
    Fault,
    Host,
    HostsAttached,
    Initialized,
    MeshRef,
    ObjectFailed,
    PortMessage,
    PortSend,
    Reload,
    SendTo,
    SpawnActors,
    SpawnProcs,
    Stop,
    Values,
    stream_of,
)

__all__ = ["FakeGateway"]

JOIN_TIMEOUT = 5.0  # seconds that the endpoints under way may take when the gateway stops
UNSUPPORTED = "meshgate.testing does not support {}: test it with ProcessJob"


class _Session(ServerSession):
    """The meshes and pending calls of one session."""

    def __init__(self, server: WireServer) -> None:
        super().__init__(server)
        self.meshes: dict[int, FakeMesh] = {}
        self.pending: list[PendingCall] = []


class _Port:
    """A port as an actor receives it: sends to the client's channel."""

    def __init__(self, session: _Session, channel: int, rank: int) -> None:
        self._session, self._channel, self._rank = session, channel, rank

    def send(self, value: Any) -> None:
        """Sends ``value`` to the receiver."""
        self.deliver(cloudpickle.dumps(value), False)

    def exception(self, error: Exception) -> None:
        """Makes the receiver raise ``error``."""
        self.deliver(cloudpickle.dumps(error), True)

    def deliver(self, data: bytes, is_error: bool) -> None:
        message = PortMessage(port=self._channel, rank=self._rank, exception=is_error)
        self._session.server.do_soon(lambda: self._session.send(message, data, stream=stream_of(self._channel)))

    def __reduce__(self) -> NoReturn:
        raise TypeError(UNSUPPORTED.format("returning a port from an endpoint"))


class FakeGateway(WireServer):
    """A gateway whose hosts are names and whose processes are threads. ``meshes`` maps names to numbers of hosts.

    Use it as a context manager and connect with ``UrlDialer(gateway.url, gateway.token)``, or use ``FakeJob``.
    """

    def __init__(self, meshes: Mapping[str, int]) -> None:
        super().__init__()
        self._counts = dict(meshes)
        self._processes: list[FakeProcess] = []
        self._kills: list[tuple[int, int, str]] = []  # object number of the processes, base rank, reason
        self.on = {
            AttachHosts: self._attach_hosts,
            SpawnProcs: self._spawn_procs,
            SpawnActors: self._spawn_actors,
            Call: self._call,
            SendTo: self._send_to,
            PortSend: self._port_send,
            ConfigureMonarch: self._configure_monarch,
            Initialized: self._initialized,
            Stop: self._stop_mesh,
            Reload: self._refuse_reload,
            Adopt: self._refuse_adopt,
            EndSession: lambda session, header, _: session.send(Done(call=header.call)),
        }

    def new_session(self) -> _Session:
        return _Session(self)

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        for process in self._processes:
            process.stop()
        for process in self._processes:
            process.join(JOIN_TIMEOUT)

    def kill_rank(self, procs: int, rank: int, reason: str) -> None:
        """Makes base rank ``rank`` of the processes with object number ``procs`` die, now or once it is spawned."""

        def kill() -> None:
            self._kills.append((procs, rank, reason))
            for session in self.sessions.values():
                assert isinstance(session, _Session)
                self._kill_ranks(session)

        self.do(kill)

    def _kill_ranks(self, session: _Session) -> None:
        for procs, rank, reason in self._kills:
            mesh = session.meshes.get(procs)
            if mesh is not None and rank not in mesh.dead:
                mesh.dead[rank] = reason
                mesh.processes[rank].stop()
                hosts = {rank: mesh.hosts[rank]}
                session.send(Fault(object=procs, mesh=mesh.name, ranks=(rank,), hosts=hosts, report=reason))
        for pending in session.pending:
            pending.fail_if_dead()

    # --- meshes

    def _attach_hosts(self, session: _Session, header: AttachHosts, _: Sequence[Fragments]) -> None:
        count = self._counts.get(header.mesh)
        if count is None:
            known = ", ".join(sorted(self._counts))
            failure = Failure(kind="invalid", message=f"the fake gateway has no mesh {header.mesh!r}, only {known}")
            session.send(ObjectFailed(object=header.object, failure=failure))
            return
        hosts = [f"{header.mesh}-{index}" for index in range(count)]
        region = Extent(("hosts",), (count,)).region
        session.meshes[header.object] = FakeMesh(header.object, "hosts", header.mesh, region, hosts)
        session.send(HostsAttached(object=header.object, hosts=tuple(Host(name=name) for name in hosts)))

    def _spawn_procs(self, session: _Session, header: SpawnProcs, buffers: Sequence[Fragments]) -> None:
        parent = session.meshes.get(header.hosts.object)
        if parent is None:
            return  # attaching the hosts has failed, and so has this on the client's side
        hosts_region, ranks = _part(parent, header.hosts)
        each = math.prod(header.per_host.values())
        hosts = [parent.hosts[rank] for rank in ranks for _ in range(each)]
        extent = hosts_region.as_shape().extent
        region = Extent((*extent.labels, *header.per_host), (*extent.sizes, *header.per_host.values())).region
        processes = [FakeProcess(f"{header.name}-{rank}", host) for rank, host in enumerate(hosts)]
        self._processes += processes
        mesh = FakeMesh(header.object, "procs", header.name, region, hosts, processes)
        session.meshes[header.object] = mesh
        if buffers:
            for process in processes:
                process.bootstrap(buffers[0].join(), self._failing(session, mesh, "actor"))
        self._kill_ranks(session)

    def _spawn_actors(self, session: _Session, header: SpawnActors, buffers: Sequence[Fragments]) -> None:
        procs = session.meshes.get(header.procs.object)
        if procs is None:
            return
        region, ranks = _part(procs, header.procs)
        mesh = FakeMesh(header.object, "actors", header.name, region, procs.hosts, procs.processes, procs.dead)
        session.meshes[header.object] = mesh
        if procs.failure is not None:
            self._fail_mesh(session, mesh, procs.failure)
            return
        data = [buffer.join() for buffer in buffers]
        for position, rank in enumerate(ranks):
            objects = [self._argument(session, argument, position) for argument in header.arguments]
            point = Point(position, region.as_shape().extent)
            procs.processes[rank].spawn(header.object, data, objects, point, self._failing(session, mesh))

    def _failing(
        self, session: _Session, mesh: FakeMesh, kind: Literal["actor", "supervision"] = "supervision"
    ) -> Callable[[str], None]:
        """Fails ``mesh`` with a traceback, from any thread."""
        return lambda report: self.do_soon(
            self._fail_mesh, session, mesh, Failure(kind=kind, message=report, mesh=mesh.name)
        )

    def _fail_mesh(self, session: _Session, mesh: FakeMesh, failure: Failure) -> None:
        if mesh.failure is None:
            mesh.failure = failure
            session.send(ObjectFailed(object=mesh.number, failure=failure))
            for pending in session.pending:
                if pending.mesh is mesh:
                    pending.fail(failure)

    def _configure_monarch(self, session: _Session, header: ConfigureMonarch, _: Sequence[Fragments]) -> None:
        session.send(Values(call=header.call), pickle.dumps(header.settings))

    def _initialized(self, session: _Session, header: Initialized, _: Sequence[Fragments]) -> None:
        self._when_idle(session, header.call, header.target)

    def _stop_mesh(self, session: _Session, header: Stop, _: Sequence[Fragments]) -> None:
        self._when_idle(session, header.call, header.target)
        mesh = session.meshes.get(header.target.object)
        if mesh is not None and mesh.kind == "procs":
            for process in mesh.processes:
                process.stop()

    def _when_idle(self, session: _Session, call: int, target: MeshRef) -> None:
        """Answers ``call`` when the processes of ``target`` have done what was submitted before."""
        mesh = session.meshes.get(target.object)
        waiting = [process for rank, process in enumerate(mesh.processes) if rank not in mesh.dead] if mesh else []
        stream = stream_of(target.object)

        def answer() -> None:
            failure = mesh.failure if mesh is not None else None
            session.send(Done(call=call) if failure is None else Failed(call=call, failure=failure), stream=stream)

        def idle(process: FakeProcess) -> None:
            waiting.remove(process)
            if not waiting:
                answer()

        if not waiting:
            answer()
        for process in list(waiting):
            process.when_idle(lambda process=process: self.do_soon(idle, process))  # type: ignore[misc]

    # --- calls and channels

    def _call(self, session: _Session, header: Call, buffers: Sequence[Fragments]) -> None:
        mesh = session.meshes.get(header.target.object)
        stream = stream_of(header.target.object)
        if mesh is None:
            failure = Failure(kind="invalid", message=f"object {header.target.object} is not a mesh of actors")
            session.send(Failed(call=header.call, failure=failure), stream=stream)
            return
        region, ranks = _part(mesh, header.target)
        if header.adverb == "choose":
            ranks = [rank for rank in ranks if rank not in mesh.dead][:1] or ranks[:1]
        session.pending = [pending for pending in session.pending if not pending.done]

        def send(answer: Any, *data: bytes) -> None:
            session.send(answer, *data, stream=stream)

        pending = PendingCall(header, mesh, ranks, send)
        session.pending.append(pending)
        if mesh.failure is not None:
            pending.fail(mesh.failure)
        pending.fail_if_dead()
        if not pending.done:
            self._cast(session, mesh, region, ranks, header, buffers, self._replying(session, pending))

    def _replying(self, session: _Session, pending: PendingCall) -> Callable[[int, bytes, bool], None]:
        """Passes a reply to ``pending``, from any thread. A broadcast's exception is a fault."""

        def report(position: int, data: bytes, is_error: bool) -> None:
            pending.reply(position, data, is_error)
            if is_error and pending.header.adverb == "broadcast":
                rank = pending.ranks[position]
                text = f"{pending.mesh.name}.{pending.header.endpoint} raised: {unpickle([data], ())}"
                hosts = {rank: pending.mesh.hosts[rank]}
                session.send(
                    Fault(object=pending.mesh.number, mesh=pending.mesh.name, ranks=(rank,), hosts=hosts, report=text)
                )

        return lambda position, data, is_error: self.do_soon(report, position, data, is_error)

    def _send_to(self, session: _Session, header: SendTo, buffers: Sequence[Fragments]) -> None:
        mesh = session.meshes.get(header.target.object)
        if mesh is None:
            return
        region, ranks = _part(mesh, header.target)
        if header.selection == "choose":
            ranks = ranks[:1]
        ports = [_Port(session, header.port, position) for position in range(len(ranks))]

        def reply(position: int, data: bytes, is_error: bool) -> None:
            ports[position].deliver(data, is_error)

        self._cast(session, mesh, region, ranks, header, buffers, reply)

    def _cast(
        self,
        session: _Session,
        mesh: FakeMesh,
        region: Region,
        ranks: Sequence[int],
        header: Call | SendTo,
        buffers: Sequence[Fragments],
        reply: Callable[[int, bytes, bool], None],
    ) -> None:
        """Submits a call to the processes of ``ranks``."""
        data = [buffer.join() for buffer in buffers]
        extent = region.as_shape().extent
        for position, rank in enumerate(ranks):
            objects = [self._argument(session, argument, position) for argument in header.arguments]
            message = Message(header.endpoint, data, objects, Point(position, extent))
            mesh.processes[rank].call(
                mesh.number,
                message,
                lambda value, bad, position=position: reply(position, value, bad),  # type: ignore[misc]
            )

    def _argument(self, session: _Session, argument: Argument, rank: int) -> Any:
        """The object behind a reference in pickled arguments, or the error to raise if they are unpickled."""
        if argument.kind == "port":
            return _Port(session, argument.ref.object, rank)
        return NotImplementedError(UNSUPPORTED.format("passing a mesh to an actor"))

    def _port_send(self, session: _Session, header: PortSend, buffers: Sequence[Fragments]) -> None:
        value = unpickle([buffer.join() for buffer in buffers], ())
        _Port(session, header.port, 0).send(value)

    # --- what it does not do

    def _refuse_reload(self, session: _Session, header: Reload, _: Sequence[Fragments]) -> None:
        failure = Failure(kind="invalid", message=UNSUPPORTED.format("reload()"))
        session.send(Failed(call=header.call, failure=failure), stream=stream_of(header.target.object))

    def _refuse_adopt(self, session: _Session, header: Adopt, _: Sequence[Fragments]) -> None:
        failure = Failure(kind="invalid", message=UNSUPPORTED.format("returning a mesh from an endpoint"))
        session.send(ObjectFailed(object=header.object, failure=failure))


def _part(mesh: FakeMesh, ref: MeshRef) -> tuple[Region, list[int]]:
    """The region that ``ref`` names, and its base ranks."""
    region = mesh.region if ref.region is None else Region.from_wire(ref.region)
    return region, list(region.slice())
