"""A scripted gateway: the wire of ``meshgate.testing``, with a function in place of the actors.

It records every message it was sent and answers calls by running the endpoint's function in the test's own process.
A test overrides the answer to a message in ``on``.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from meshgate.shapes.shape import Region
from meshgate.testing.wire_server import ServerSession, WireServer
from meshgate_wire import Fragments
from meshgate_wire.messages import (
    AttachHosts,
    Call,
    Done,
    EndSession,
    GetControllers,
    Host,
    HostsAttached,
    Initialized,
    Item,
    MeshRef,
    SpawnActors,
    SpawnProcs,
    Stop,
    Values,
    stream_of,
)

TOKEN = WireServer.token


class ScriptedSession(ServerSession):
    def __init__(self, gateway: ScriptedGateway) -> None:
        super().__init__(gateway)
        self.gateway = gateway
        self.ranks: dict[int, list[int]] = {}  # by object number: its base ranks

    def ranks_of(self, ref: MeshRef) -> list[int]:
        """The base ranks that ``ref`` names."""
        return self.ranks[ref.object] if ref.region is None else list(Region.from_wire(ref.region).slice())


class ScriptedGateway(WireServer):
    """Serves on ``url`` inside a ``with`` block. ``functions[endpoint](rank, *args, **kwargs)`` answers calls."""

    def __init__(self, **functions: Callable[..., Any]) -> None:
        super().__init__()
        self.functions = {"add": lambda rank, amount: amount, **functions}
        self.hosts = ("workers-0", "workers-1")
        self.on = {
            AttachHosts: self._attach,
            SpawnProcs: self._spawn_procs,
            SpawnActors: self._spawn_actors,
            GetControllers: lambda session, header, _: session.ranks.update({header.object: [0]}),
            Call: self._call,
            Stop: lambda session, header, _: session.send(
                Done(call=header.call), stream=stream_of(header.target.object)
            ),
            Initialized: lambda session, header, _: session.send(Done(call=header.call)),
            EndSession: lambda session, header, _: session.send(Done(call=header.call)),
        }

    def new_session(self) -> ScriptedSession:
        return ScriptedSession(self)

    def session(self) -> Any:
        """The only session."""
        (session,) = self.sessions.values()
        return session

    def got(self, kind: type) -> list[Any]:
        """The received messages of a type, in order."""
        return [header for header in self.received if type(header) is kind]

    def _attach(self, session: ScriptedSession, header: AttachHosts, _: Sequence[Fragments]) -> None:
        session.ranks[header.object] = list(range(len(self.hosts)))
        session.send(HostsAttached(object=header.object, hosts=tuple(Host(name=name) for name in self.hosts)))

    def _spawn_procs(self, session: ScriptedSession, header: SpawnProcs, _: Sequence[Fragments]) -> None:
        size = len(session.ranks_of(header.hosts)) * math.prod(header.per_host.values())
        session.ranks[header.object] = list(range(size))

    def _spawn_actors(self, session: ScriptedSession, header: SpawnActors, _: Sequence[Fragments]) -> None:
        session.ranks[header.object] = session.ranks_of(header.procs)

    def _call(self, session: ScriptedSession, header: Call, buffers: Sequence[Fragments]) -> None:
        if header.adverb == "broadcast":
            return
        function = self.functions[header.endpoint]
        args, kwargs = unpickle(header, buffers)
        ranks = session.ranks_of(header.target)
        if header.adverb == "choose":
            ranks = ranks[:1]
        values = [pickle.dumps(function(rank, *args, **kwargs)) for rank in ranks]
        stream = stream_of(header.target.object)
        if header.adverb == "stream":
            for position, value in enumerate(values):
                session.send(Item(call=header.call, rank=position), value, stream=stream)
        else:
            session.send(Values(call=header.call), *values, stream=stream)


class Reference:
    """The value of a proxy in unpickled arguments."""

    def __init__(self, argument: Any) -> None:
        self.argument = argument


def unpickle(header: Any, buffers: Sequence[Fragments]) -> Any:
    """The ``(args, kwargs)`` of a call, with a ``Reference`` for each proxy."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Reference:
            return Reference(header.arguments[pid])

    data, *beside = (buffer.join() for buffer in buffers)
    return Unpickler(io.BytesIO(data), buffers=beside).load()
