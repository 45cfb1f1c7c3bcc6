"""A gateway that runs actor classes in threads of the test's process."""

from __future__ import annotations

import math
import pickle
import random
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import cloudpickle

from meshgate.shapes.shape import Extent, Point, Region
from meshgate.testing.fake_process import FakeCall, FakeMesh, FakeProcess, Message, unpickle
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
    PutValue,
    ReadKept,
    Reload,
    SendTo,
    SpawnActors,
    SpawnProcs,
    Stop,
    Values,
    stream_of,
)

GATHER_FAILURES = 0.25  # seconds from the first exception of a call to its answer, as in a real gateway
JOIN_TIMEOUT = 5.0  # seconds that the endpoints under way may take when the gateway stops
UNSUPPORTED = "meshgate.testing does not support {}: test it with ProcessJob"


class _Session(ServerSession):
    """The meshes and pending calls of one session."""

    def __init__(self, server: WireServer) -> None:
        super().__init__(server)
        self.meshes: dict[int, FakeMesh] = {}
        self.pending: list[FakeCall] = []


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
            PutValue: self._refuse_kept,
            ReadKept: self._refuse_kept,
            Adopt: self._refuse_adopt,
            EndSession: lambda session, header, _: session.send(Done(call=header.call)),
        }

    def new_session(self) -> _Session:
        return _Session(self)

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        for process in self._processes:
            process.stop()
        end = time.monotonic() + JOIN_TIMEOUT
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))

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
                actors = [each for each in session.meshes.values() if each.parent is mesh]
                for each in [each for each in actors if rank in each.region.slice()] or [mesh]:
                    if rank not in each.aborted:
                        self._report_death(session, each, rank, reason)

    def _report_death(self, session: _Session, mesh: FakeMesh, rank: int, report: str) -> None:
        """Fails the calls that wait for the rank, and then reports a fault, as a real gateway."""
        for pending in session.pending:
            pending.fail_if_dead()
        hosts = {rank: mesh.hosts[rank]}
        session.send(Fault(object=mesh.number, mesh=mesh.name, ranks=(rank,), hosts=hosts, report=report))

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
        mesh = FakeMesh(header.object, "procs", header.name, region, hosts, processes, parent=parent)
        session.meshes[header.object] = mesh
        if buffers:
            for process in processes:
                process.bootstrap(buffers[0].join(), self._failing(session, mesh, header))
        self._kill_ranks(session)

    def _spawn_actors(self, session: _Session, header: SpawnActors, buffers: Sequence[Fragments]) -> None:
        procs = session.meshes.get(header.procs.object)
        if procs is None:
            return
        region, ranks = _part(procs, header.procs)
        mesh = FakeMesh(
            header.object, "actors", header.name, region, procs.hosts, procs.processes, procs.dead, parent=procs
        )
        session.meshes[header.object] = mesh
        failure = _failure_of(mesh) or self._refusal(header, procs, ranks)
        if failure is not None:
            self._fail_mesh(session, mesh, failure)
            return
        data = [buffer.join() for buffer in buffers]
        for position, rank in enumerate(ranks):
            objects = [self._argument(session, argument, position) for argument in header.arguments]
            point = Point(position, region.as_shape().extent)
            failed = self._aborting(session, mesh, rank, point)
            procs.processes[rank].spawn(header.object, data, objects, point, failed)

    def _refusal(self, header: SpawnActors, procs: FakeMesh, ranks: Sequence[int]) -> Failure | None:
        """As Monarch, which spawns no actors on processes of which one is dead, or one has an actor that has failed."""
        if dead := [rank for rank in ranks if rank in procs.dead]:
            report = procs.dead[dead[0]]
            return Failure.of_spawn_on_dead(header.name, header.class_name, procs.name, dead, report)
        if failed := [rank for rank in ranks if rank in procs.aborted]:
            reason = (
                "error spawning actor mesh: statuses: Failed(Cannot spawn new actors on mesh with supervision events): "
                f"ranks {failed}\n"
                "An actor failed in these processes, so Monarch spawns no others in them: spawn new processes"
            )
            return Failure.of_spawn(header.name, header.class_name, reason)
        return None

    def _aborting(self, session: _Session, mesh: FakeMesh, rank: int, point: Point) -> Callable[[str], None]:
        """Makes the actor of ``mesh`` at base rank ``rank`` a dead one, with a traceback, from any thread."""
        place = ", ".join(f"{label!r}: {point[label]}/{size}" for label, size in point.extent.items())

        def abort(report: str) -> None:
            text = (
                f"The actor <root>.<{mesh.name}{{{place}}}> and all its descendants have failed:\n"
                f"  actor explicitly aborted due to: {textwrap.indent(report, '  ').strip()}\n"
            )
            self._abort(session, mesh, rank, text)

        return lambda report: self.do_soon(abort, report)

    def _abort(self, session: _Session, mesh: FakeMesh, rank: int, report: str) -> None:
        if rank in mesh.aborted or rank in mesh.dead or mesh.failure is not None:
            return
        mesh.aborted[rank] = report
        if mesh.parent is not None:
            mesh.parent.aborted[rank] = report
        mesh.processes[rank].stop_actor(mesh.number)
        self._report_death(session, mesh, rank, report)

    def _failing(self, session: _Session, mesh: FakeMesh, header: SpawnProcs) -> Callable[[str], None]:
        """Fails ``mesh`` with the traceback of its bootstrap, from any thread."""
        step = f"spawn_procs({dict(header.per_host)}, name={header.name!r})"
        return lambda report: self.do_soon(
            self._fail_mesh, session, mesh, Failure(kind="actor", message=report, step=step, mesh=mesh.name)
        )

    def _fail_mesh(self, session: _Session, mesh: FakeMesh, failure: Failure) -> None:
        if mesh.failure is None:
            mesh.failure = failure
            session.send(ObjectFailed(object=mesh.number, failure=failure))
            for process in mesh.processes if mesh.kind == "procs" else ():
                process.stop()  # some may have come up
            for pending in session.pending:
                if (failed := _failure_of(pending.mesh)) is not None:
                    pending.fail(failed)

    def _configure_monarch(self, session: _Session, header: ConfigureMonarch, _: Sequence[Fragments]) -> None:
        session.send(Values(call=header.call), pickle.dumps(header.settings))

    def _initialized(self, session: _Session, header: Initialized, _: Sequence[Fragments]) -> None:
        """Answers when the processes, or the actors, of the target have been started."""
        mesh = session.meshes.get(header.target.object)
        actor = mesh.number if mesh is not None and mesh.kind == "actors" else None
        self._when_created(mesh, header.target, actor, lambda: self._answer(session, header, mesh))

    def _when_created(self, mesh: FakeMesh | None, part: MeshRef, actor: int | None, then: Callable[[], None]) -> None:
        """Calls ``then`` when the actors, or without one the processes, of ``part`` have started, failed or ended."""
        waiting: set[int] = set()
        if mesh is not None and mesh.kind != "hosts":
            waiting = {rank for rank in _part(mesh, part)[1] if rank not in mesh.dead}

        def created(rank: int) -> None:
            waiting.remove(rank)
            if not waiting:
                then()

        if mesh is None or not waiting:
            then()
            return
        for rank in list(waiting):
            mesh.processes[rank].when_created(actor, lambda rank=rank: self.do_soon(created, rank))  # type: ignore[misc]

    def _stop_mesh(self, session: _Session, header: Stop, _: Sequence[Fragments]) -> None:
        """Ends calls that run: as the real engine, it does not wait for them, but for processes to come up."""
        mesh = session.meshes.get(header.target.object)

        def stop() -> None:
            if mesh is not None and (refusal := self._stop_refusal(mesh)) is not None:
                session.send(Failed(call=header.call, failure=refusal), stream=stream_of(header.target.object))
                return
            if mesh is not None:
                self._stop_ranks(session, mesh, _part(mesh, header.target)[1], header.reason)
                for pending in session.pending:
                    pending.fail_if_dead()
            self._answer(session, header, mesh)

        self._when_created(mesh, header.target, None, stop)

    def _stop_refusal(self, mesh: FakeMesh) -> Failure | None:
        """As Monarch, which stops no actors of a mesh of which a process was killed."""
        if mesh.kind != "actors" or mesh.parent is None:
            return None
        for procs, rank, reason in self._kills:
            if procs == mesh.parent.number and mesh.dead.get(rank) == reason and rank in mesh.region.slice():
                return Failure.of_stop(mesh.name, rank, reason)
        return None

    def _answer(self, session: _Session, header: Initialized | Stop, mesh: FakeMesh | None) -> None:
        failure = mesh.failure if mesh is not None else None
        if mesh is not None and (failure is None or failure.kind != "actor"):  # not of its own bootstrap
            failure = _failure_of(mesh)
        answer = Done(call=header.call) if failure is None else Failed(call=header.call, failure=failure)
        session.send(answer, stream=stream_of(header.target.object))

    def _stop_ranks(self, session: _Session, mesh: FakeMesh, ranks: Sequence[int], reason: str) -> None:
        if mesh.kind != "hosts":
            lost = mesh.aborted if mesh.kind == "actors" else mesh.dead
            lost.update({rank: f"mesh {mesh.name!r} was stopped: {reason}" for rank in ranks if rank not in lost})
        for child in [each for each in session.meshes.values() if each.parent is mesh]:
            self._stop_ranks(session, child, range(len(child.hosts)) if mesh.kind == "hosts" else ranks, reason)
        for rank in ranks:
            if mesh.kind == "actors":
                mesh.processes[rank].stop_actor(mesh.number)
            elif mesh.kind == "procs":
                mesh.processes[rank].stop()

    # --- calls and channels

    def _call(self, session: _Session, header: Call, buffers: Sequence[Fragments]) -> None:
        mesh = session.meshes.get(header.target.object)
        stream = stream_of(header.target.object)
        if mesh is None:
            failure = Failure(kind="invalid", message=f"object {header.target.object} is not a mesh of actors")
            session.send(Failed(call=header.call, failure=failure), stream=stream)
            return
        if header.keep or any(argument.kind == "kept" for argument in header.arguments):
            self._refuse_kept(session, header, buffers)
            return
        region, ranks = _part(mesh, header.target)
        if header.adverb == "choose":
            ranks = _choose(ranks, mesh)
        session.pending = [pending for pending in session.pending if not pending.done]

        def send(answer: Any, *data: bytes) -> None:
            session.send(answer, *data, stream=stream)

        pending = FakeCall(header, mesh, ranks, send)
        session.pending.append(pending)
        if (failed := _failure_of(mesh)) is not None:
            pending.fail(failed)
        pending.fail_if_dead()
        if not pending.done:
            self._cast(session, mesh, region, ranks, header, buffers, self._replying(pending))

    def _replying(self, pending: FakeCall) -> Callable[[int, bytes, bool], None]:
        """Passes a reply to ``pending``, from any thread."""

        def report(position: int, data: bytes, is_error: bool) -> None:
            if pending.reply(position, data, is_error):
                self._loop.call_later(GATHER_FAILURES, pending.finish)

        return lambda position, data, is_error: self.do_soon(report, position, data, is_error)

    def _send_to(self, session: _Session, header: SendTo, buffers: Sequence[Fragments]) -> None:
        mesh = session.meshes.get(header.target.object)
        if mesh is None:
            return
        region, ranks = _part(mesh, header.target)
        if header.selection == "choose":
            ranks = _choose(ranks, mesh)
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
        target = list(region.slice())
        for position, rank in enumerate(ranks):
            point = Point(target.index(rank), extent)  # of a chosen rank, too
            objects = [self._argument(session, argument, point.rank) for argument in header.arguments]
            cast = isinstance(header, Call) and header.adverb == "broadcast"
            message = Message(header.endpoint, data, objects, point, cast)
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

    def _refuse_kept(self, session: _Session, header: Call | PutValue | ReadKept, _: Sequence[Fragments]) -> None:
        failure = Failure(kind="invalid", message=UNSUPPORTED.format("keep() and put()"))
        session.send(Failed(call=header.call, failure=failure), stream=stream_of(header.target.object))

    def _refuse_adopt(self, session: _Session, header: Adopt, _: Sequence[Fragments]) -> None:
        failure = Failure(kind="invalid", message=UNSUPPORTED.format("returning a mesh from an endpoint"))
        session.send(ObjectFailed(object=header.object, failure=failure))


def _failure_of(mesh: FakeMesh) -> Failure | None:
    """What requests for ``mesh`` fail with if it, or the processes of its actors, could not be created."""
    for each in (mesh, mesh.parent):
        if each is not None and each.failure is not None:
            return each.failure.as_cause()
    return None


def _choose(ranks: list[int], mesh: FakeMesh) -> list[int]:
    """A random rank, one that is not dead if there is any."""
    return [random.choice([rank for rank in ranks if rank not in mesh.dead and rank not in mesh.aborted] or ranks)]


def _part(mesh: FakeMesh, ref: MeshRef) -> tuple[Region, list[int]]:
    """The region that ``ref`` names, and its base ranks."""
    region = mesh.region if ref.region is None else Region.from_wire(ref.region)
    return region, list(region.slice())
