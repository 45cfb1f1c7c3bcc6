"""Everything that is bound to a release of Monarch (written against torchmonarch 0.7), in one place.

The engine forwards; it never looks into what users pickle. Three facts of Monarch make that possible:

- A message to an actor is a pickle that only the actor opens, so the laptop's bytes go out as they came.
- Replies reach a port of our own as messages with a rank, while the library's own ``call`` keeps the rank to
  itself; and ``PythonMessage.decode`` unpickles with ``cloudpickle.cloudpickle.loads``, looked up when it is
  called. ``raw_reply`` puts a function there that, on this thread and for the length of one decode, hands back
  the bytes.
- An object whose ``__reduce__`` is ``(pickle.loads, (data,))`` arrives as what ``data`` holds: an actor class
  reaches the worker although this process could not import it.
"""

from __future__ import annotations

import os
import pickle
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import cloudpickle
import cloudpickle.cloudpickle

from meshgate_sync import place
from meshgate_wire.messages import Region

ENVIRONMENT: Mapping[str, str] = {
    # A killed process or host is noticed within two seconds, by this and by the processes' own connections.
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s",
    # A process whose answer to a query waits behind a large result is not dead: 1 GB takes longer than 3 s.
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "30s",
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "30s",
    # Workers end processes whose root client is gone. Below 35 s it ends live ones.
    "HYPERACTOR_MESH_ORPHAN_TIMEOUT": "60s",
    # Attaching sets it on hosts, too. One that can neither deliver a message to a process that was killed nor return
    # it to a root client that is gone ends itself, and what other sessions run there: so it is to keep trying.
    "HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": "365d",
    # Messages of a gigabyte are calls like any other.
    "HYPERACTOR_CODEC_MAX_FRAME_LENGTH": str(16 * 2**30),
}

Fragments: TypeAlias = Sequence[bytes | memoryview]  # views only of what this process itself has made
SLICE_CACHE = 256
_KILLED = "Killed(sig=9)"
_KILLED_HINT = " (where nobody sent it, the kernel did: the memory of the machine, or what its pod may use, ran out)"
COPIED = 16 * 1024  # smaller replies are copied, which is cheaper than a view


@dataclass(frozen=True, slots=True)
class Fault:
    """A supervision event: which ranks of which mesh are lost, in Monarch's words."""

    mesh: str
    ranks: tuple[int, ...]
    report: str


class Reply(NamedTuple):
    """One actor's answer. ``data`` is a pickle nobody here has opened; ``references`` are the meshes it pops."""

    rank: int | None
    exception: bool
    data: bytes | memoryview
    references: tuple[Any, ...]


class Forward:
    """Pickles as the value that a pickle of the laptop's holds, without opening it."""

    __slots__ = ("_buffers", "_data", "_objects")

    def __init__(self, data: Fragments, buffers: Sequence[Fragments] = (), objects: Sequence[Any] = ()) -> None:
        self._data, self._buffers, self._objects = data, buffers, objects

    def __reduce__(self) -> tuple[Any, ...]:
        data = self._data[0] if len(self._data) == 1 else _Joined(self._data)
        if not self._buffers and not self._objects:
            return pickle.loads, (data,)
        from meshgate_gateway.engine import on_worker  # noqa: PLC0415 - only messages with buffers need it

        buffers = [_Joined(buffer) for buffer in self._buffers]
        return on_worker.rebuild, (data, buffers, list(self._objects))


class _Joined:
    """Fragments that arrive as one bytearray; each is handed to Monarch without a copy here."""

    __slots__ = ("_fragments",)

    def __init__(self, fragments: Fragments) -> None:
        self._fragments = fragments

    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray().join, (list(self._fragments),)


class ActorMeshArgument:
    """Pickles as the real ``ActorMesh``, whose class only the worker can import."""

    __slots__ = ("_fields",)

    def __init__(self, class_data: Fragments, name: str, inner: Any, shape: Any, procs: Any) -> None:
        self._fields = (Forward(class_data), name, inner, shape, procs)

    def __reduce__(self) -> tuple[Any, ...]:
        from monarch._src.actor.actor_mesh import ActorMesh  # noqa: PLC0415 - Monarch is loaded by Binding

        return ActorMesh, self._fields


_decoding = threading.local()
_real_loads = cloudpickle.loads


def _loads_or_borrow(data: Any, /, *args: Any, **kwargs: Any) -> Any:
    count = getattr(_decoding, "references", None)
    if count is None:
        return _real_loads(data, *args, **kwargs)
    if count == 0:
        return _flat(data), ()
    from monarch._rust_bindings.monarch_hyperactor.pickle import pop_mesh_reference  # noqa: PLC0415

    return _flat(data), tuple(pop_mesh_reference() for _ in range(count))


def _flat(data: Any) -> bytes | memoryview:
    """``data``, a buffer of Monarch's, as bytes that can be looked at.

    Its own views have a format that points nowhere: ``memoryview.format`` and ``cast`` crash the process. A
    ``PickleBuffer`` never looks there.
    """
    return bytes(data) if len(data) <= COPIED else pickle.PickleBuffer(data).raw()


def _as_region(region: Region) -> Any:
    from monarch._rust_bindings.monarch_hyperactor.shape import Region as HyRegion  # noqa: PLC0415
    from monarch._rust_bindings.monarch_hyperactor.shape import Slice  # noqa: PLC0415

    return HyRegion(
        list(region.labels),
        Slice(offset=region.offset, sizes=list(region.sizes), strides=list(region.strides)),
    )


class Binding:
    """This process's Monarch root client. One per process; made on the thread that runs the loop."""

    def __init__(self, transport: str | None, on_fault: Callable[[Fault], None]) -> None:
        """``transport``: a channel address such as ``tcp://10.0.0.3:0``, or None for unix sockets.

        ``on_fault`` is called on a thread of Monarch's.
        """
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        cloudpickle.loads = cloudpickle.cloudpickle.loads = _loads_or_borrow
        import monarch.actor as api  # noqa: PLC0415 - only after the environment is set
        from monarch._rust_bindings.monarch_hyperactor import actor, buffers, mailbox  # noqa: PLC0415
        from monarch._rust_bindings.monarch_hyperactor import pickle as monarch_pickle  # noqa: PLC0415
        from monarch._rust_bindings.monarch_hyperactor.proc_mesh import ProcMesh  # noqa: PLC0415
        from monarch._src.actor import actor_mesh  # noqa: PLC0415

        from meshgate_gateway.engine import on_worker  # noqa: PLC0415

        for module in (on_worker, place):
            cloudpickle.register_pickle_by_value(module)
        self._api, self._actor, self._buffers, self._mailbox = api, actor, buffers, mailbox
        self._pickle, self._actor_mesh, self._native_procs = monarch_pickle, actor_mesh, ProcMesh
        if transport is not None:
            api.enable_transport(transport)
        api.unhandled_fault_hook = lambda failure: on_fault(_fault(failure))
        self._instance = api.context().actor_instance
        self._native = self._instance._as_rust()
        self._ports = self._instance._mailbox
        self._kinds = {"sync": actor.ActorKind.SYNC, "async": actor.ActorKind.ASYNC}
        self._exception = actor.PythonMessageKind.Exception
        self._call_method = actor.PythonMessageKind.CallMethod
        self._returns_response = actor.MethodSpecifier.ReturnsResponse
        self._answers_itself = actor.MethodSpecifier.ExplicitPort

    # --- meshes -----------------------------------------------------------------------------------------

    def attach(self, name: str, addresses: Sequence[str]) -> Any:
        return self._api.attach_to_workers(name=name, ca="trust_all_connections", workers=list(addresses))

    def spawn_procs(self, hosts: Any, per_host: Mapping[str, int], name: str, bootstrap: Any) -> Any:
        return hosts.spawn_procs(per_host=dict(per_host), bootstrap=bootstrap, name=name)

    def part(self, mesh: Any, region: Region) -> Any:
        """The part ``region`` of a host or proc mesh."""
        return mesh._new_with_shape(_as_region(region).as_shape())

    def part_of_actors(self, inner: Any, region: Region) -> Any:
        return inner.new_with_region(_as_region(region))

    def spawn_actors(
        self,
        procs: Any,
        name: str,
        class_name: str,
        kind: Literal["sync", "async"],
        class_data: Fragments,
        arguments: Any,
    ) -> Any:
        """What ``ProcMesh.spawn`` does, for a class that only the workers can import.

        ``arguments`` pickles as ``(args, kwargs)``. Returns the native actor mesh.
        """
        init = self._actor_mesh.ActorInitArgs(
            _ResolvedClass(class_data, class_name),
            procs,
            procs._controller_controller or self._instance._controller_controller,
            name,
            self._instance._as_creator(),
            _Positional(arguments),
        )
        state = self._pickle.pickle(
            ((init,), _Keywords(arguments)), allow_tensor_engine_references=True, allow_mesh_references=True
        )
        call = self._actor.PythonMessageKind.CallMethod(self._actor.MethodSpecifier.Init(), None, None)
        return self._native_procs.spawn_async(
            procs._proc_mesh,
            self._native,
            name,
            self._actor_mesh._Actor,
            self._pickle.PendingMessage(call, state),
            self._kinds[kind],
            emulated=False,
            supervision_display_name=f"{self._instance}.<{class_name} {name}>",
        )

    def spawn_own(self, procs: Any, name: str, Class: type, kind: Literal["sync", "async"], *args: Any) -> Any:
        """Spawns an actor of the engine's own, its class delivered by value. Returns the native actor mesh."""
        module = sys.modules[Class.__module__]
        cloudpickle.register_pickle_by_value(module)
        return self.spawn_actors(
            procs, name, Class.__name__, kind, [cloudpickle.dumps(Class)], self.own_arguments(*args)
        )

    async def ask_own(self, inner: Any, count: int, endpoint: str, *args: Any) -> list[Any]:
        """Calls an endpoint of such an actor; the ``count`` answers by rank. Raises the first exception among them."""
        port, receiver = self.open_port()
        self.cast(inner, endpoint, False, self.own_arguments(*args), "all", port)
        answers: dict[int, Any] = {}
        for _ in range(count):
            reply = self.raw_reply(await self.receive(receiver))
            value = pickle.loads(reply.data)
            if reply.exception:
                raise value
            answers[reply.rank or 0] = value
        return [answers[rank] for rank in range(count)]

    def own_arguments(self, *args: Any) -> Any:
        """Arguments of the engine's own, as ``cast`` and ``spawn_actors`` take them."""
        return self.arguments([pickle.dumps((args, {}))], (), ())

    async def initialized(self, mesh: Any) -> None:
        await mesh.initialized

    async def actors_initialized(self, inner: Any) -> str:
        """Waits until the actors' constructors ran; returns the mesh's unique name."""
        await inner.initialized().as_asyncio()
        name: str = await inner.name().as_asyncio()
        return name

    async def stop_actors(self, inner: Any, reason: str) -> None:
        await inner.stop(self._native, reason).as_asyncio()

    async def stop_procs(self, procs: Any, reason: str) -> None:
        await procs.stop(reason)

    async def stop_hosts(self, hosts: Any) -> None:
        await hosts.stop()

    async def shut_down_hosts(self, hosts: Any) -> None:
        await hosts.shutdown()

    # --- messages ---------------------------------------------------------------------------------------

    def arguments(self, data: Fragments, buffers: Sequence[Fragments], objects: Sequence[Any]) -> Any:
        """A payload for ``cast`` and ``spawn_actors``: the laptop's pickle with what it refers to."""
        return Forward(data, buffers, objects)

    def cast(self, inner: Any, endpoint: str, explicit_port: bool, arguments: Any, selection: str, port: Any) -> None:
        """Sends a call to an actor mesh, which may still be coming up. ``port``: where answers go, or None."""
        method = self._answers_itself(endpoint) if explicit_port else self._returns_response(endpoint)
        call = self._call_method(method, port, None)
        inner.cast_unresolved(self._pickle.PendingMessage(call, self._pickled(arguments)), selection, self._native)

    def _pickled(self, arguments: Any) -> Any:
        if isinstance(arguments, Forward) and not arguments._buffers and not arguments._objects:
            frozen = self._buffers.Buffer()
            for fragment in arguments._data:
                frozen.write(fragment)
            return self._pickle.PicklingState(frozen.freeze())
        return self._pickle.pickle(arguments, allow_tensor_engine_references=True, allow_mesh_references=True)

    def open_port(self) -> tuple[Any, Any]:
        """A port reference to send along, and its receiver for ``receive``."""
        handle, receiver = self._ports.open_port()
        return handle.bind(), receiver

    def receive(self, receiver: Any) -> Any:
        """An asyncio future of the receiver's next message; see ``raw_reply``."""
        return receiver.recv_task().spawn_handle().as_asyncio()

    def raw_reply(self, message: Any) -> Reply:
        """The reply in ``message``, its pickle unopened."""
        kind = message.kind
        _decoding.references = len(message.refs)
        try:
            data, references = message.decode()
        finally:
            _decoding.references = None
        return Reply(kind.rank, isinstance(kind, self._exception), data, references)

    def port_argument(self, port: Any) -> Any:
        return self._api.Port(port, self._native, None)

    def port_at(self, address: str) -> Any:
        return self._mailbox.PortRef(self._mailbox.PortId.from_string(address))

    def port_send(self, port: Any, arguments: Any) -> None:
        kind = self._actor.PythonMessageKind.Result(None)
        message = self._pickle.PendingMessage(kind, self._pickled(arguments)).try_resolve_now()
        if message is None:
            raise ValueError("a mesh that is still being created cannot be sent through a port")
        port.send(self._native, message)

    # --- what arrives from workers ----------------------------------------------------------------------

    def adopt_procs(self, native: Any, hosts: Any, region: Region, root: Region) -> Any:
        from monarch._src.actor.proc_mesh import ProcMesh  # noqa: PLC0415 - Monarch is loaded by now

        return ProcMesh._from_initialized_hy_proc_mesh(native, hosts, _as_region(region), _as_region(root))

    def adopt_hosts(self, native: Any, region: Region) -> Any:
        from monarch._src.actor.host_mesh import HostMesh  # noqa: PLC0415 - Monarch is loaded by now

        return HostMesh._from_initialized_hy_host_mesh(native, _as_region(region), False, False)

    def actors_argument(self, class_data: Fragments, name: str, inner: Any, region: Region, procs: Any) -> Any:
        return ActorMeshArgument(class_data, name, inner, _as_region(region).as_shape(), procs)


class _ResolvedClass:
    """Pickles as the actor class; where the worker cannot import it, the error says where it looked."""

    __slots__ = ("_data", "_name")

    def __init__(self, data: Fragments, name: str) -> None:
        self._data, self._name = data, name

    def __reduce__(self) -> tuple[Any, ...]:
        from meshgate_gateway.engine import on_worker  # noqa: PLC0415 - cloudpickle ships it by value

        return on_worker.resolve_class, (b"".join(self._data), self._name)


class _Positional:
    """The ``args`` of a pickled ``(args, kwargs)``."""

    __slots__ = ("_both",)

    def __init__(self, both: Any) -> None:
        self._both = both

    def __reduce__(self) -> tuple[Any, ...]:
        import operator  # noqa: PLC0415

        return operator.getitem, (self._both, 0)


class _Keywords(_Positional):
    """The ``kwargs`` of a pickled ``(args, kwargs)``."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        import operator  # noqa: PLC0415

        return operator.getitem, (self._both, 1)


def told(error: BaseException) -> str:
    """What Monarch says in ``error``, without the stack of its own that it appends."""
    return str(error).partition("\n\nStack backtrace:\n")[0].rstrip()


def silent_at(report: str, addresses: Sequence[str]) -> list[str]:
    """Those of ``addresses`` at which nobody answered, where ``report`` is of an attach that failed."""
    if not report.startswith("attach failed"):
        return []
    return [address for address in addresses if re.search(rf"{re.escape(address.replace('://', ':'))}\b", report)]


def _fault(failure: Any) -> Fault:
    """Monarch 0.7 tells the ranks in the failure's text alone."""
    text = repr(failure)
    ranks: tuple[int, ...] = ()
    _, found, rest = text.partition("crashed_ranks=[")
    if found:
        listed = rest.partition("]")[0]
        ranks = tuple(int(rank) for rank in listed.split(",") if rank.strip())
    report = failure.report()
    return Fault(failure.mesh_name, ranks, f"{report}{_KILLED_HINT}" if _KILLED in report else report)
