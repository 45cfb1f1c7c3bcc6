"""Monarch 0.7: everything that is bound to this release.

Private names of Monarch (``monarch._src``, ``monarch._rust_bindings``) and its environment variables appear here only.
The engine forwards what users pickle without opening it, which three facts of this release make possible:

- A message to an actor is a pickle that only the actor opens, so the client's bytes leave unchanged.
- Replies to a port of our own arrive as messages with a rank, which the library's own ``call`` does not expose
  (``pickles.py``).
- Monarch accepts objects that pickle as something else (``pickles.py`` again), also as an actor's class.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import cloudpickle

from meshgate_gateway.engine.monarch.interface import (
    BatchedReply,
    BootstrapFailed,
    Fault,
    Fragments,
    Monarch,
    OnFault,
    Reply,
    explain_fault,
)
from meshgate_gateway.engine.monarch.pickles import (
    COPY_LIMIT,
    LARGE,
    MARK,
    Forward,
    ForwardAt,
    ForwardClass,
    ForwardItem,
    ForwardWithTrace,
    Large,
    OnProcess,
    change_cloudpickle,
    dumps_with_objects,
    undecoded,
)
from meshgate_gateway.engine.monarch.same_versions import SameVersions
from meshgate_gateway.engine.monarch.settings import MonarchSettings
from meshgate_gateway.engine.monarch.telemetry import Collector
from meshgate_gateway.engine.on_worker import (
    batches,
    breakpoints,
    kept_references,
    kept_values,
    large_messages,
    output_marks,
    ports,
    running_calls,
    stacks,
    tracing,
)
from meshgate_gateway.engine.on_worker import process as on_worker
from meshgate_processes import control_groups
from meshgate_sync.store import place
from meshgate_wire.messages import BootstrapCommand, Host, Launch, Region

ENVIRONMENT: Mapping[str, str] = {
    # Monarch reports a killed process or host within 2 s; the processes' own connections close sooner.
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s",
    # Workers end processes whose root client is gone. Below 35 s they end processes of live clients too.
    "HYPERACTOR_MESH_ORPHAN_TIMEOUT": "60s",
}
# Clients may change these, unless the gateway's environment sets them, which outranks what is configured.
SETTINGS: Mapping[str, Any] = {
    # Report a frozen host after half of Monarch's minute. Much less would end living ones: the answer of a process to a
    # query may wait behind a result of several gigabytes.
    "get_proc_state_max_idle": "30s",
    # Attaching sets this on hosts as well. A host that can neither deliver a message to a killed process nor return it
    # to a root client that is gone ends itself and everything that other sessions run there, so let it retry.
    "message_delivery_timeout": "365d",
    # Allow messages of several gigabytes.
    "codec_max_frame_length": 16 * 2**30,
}

STORE = f"{kept_references.MODULE}:store"  # on workers: what serves the kept values of the process
CONTEXT = "monarch._src.actor.actor_mesh:_context"  # on workers: the variable of the context of the message at hand
SPAN_FUNCTIONS = (  # on workers: what opens Monarch's span around an endpoint, and a concurrent one
    "monarch._src.actor.actor_mesh:span_with_correlation_id",
    "monarch._src.actor.concurrent:span",
)
PROCESS_ID = re.compile(r"ProcRef \{ proc_id: <(.+?)>, create_rank")  # in the repr of a mesh

ARGUMENTS = ("-m", "monarch._src.actor.bootstrap_main")

# Only the host knows its Python: that of its process, which starts this shell. $0 is the Python of the engine, for
# systems without /proc, where hosts run on the engine's machine.
HOSTS_PYTHON = (
    'python=$0; [ ! -r /proc/$PPID/cmdline ] || python=$(tr "\\000" "\\n" </proc/$PPID/cmdline | head -n 1); '
    'exec "$python" "$@"'
)


def _native_region(region: Region) -> Any:
    from monarch._rust_bindings.monarch_hyperactor.shape import Region as NativeRegion  # noqa: PLC0415
    from monarch._rust_bindings.monarch_hyperactor.shape import Slice  # noqa: PLC0415

    return NativeRegion(
        list(region.labels),
        Slice(offset=region.offset, sizes=list(region.sizes), strides=list(region.strides)),
    )


def _fault(failure: Any) -> Fault:
    """Only the text of a failure names its ranks."""
    ranks: tuple[int, ...] = ()
    _, found, rest = repr(failure).partition("crashed_ranks=[")
    if found:
        ranks = tuple(int(rank) for rank in rest.partition("]")[0].split(",") if rank.strip())
    return Fault(failure.mesh_name, ranks, explain_fault(failure.report()))


def native_commands(launch: Launch) -> Callable[[Any], Any] | None:
    """For ``HostMesh.spawn_procs``: returns the command of the process at a point. None: the host's default."""
    if not launch.commands:
        return None
    commands = [_native_command(command) for command in launch.commands]
    return lambda point: commands[launch.command_of[point.rank] if launch.command_of else 0]


def _native_command(command: BootstrapCommand) -> Any:
    from monarch._rust_bindings.monarch_hyperactor import host_mesh  # noqa: PLC0415 - loaded by Client

    args = ARGUMENTS if command.args is None else command.args
    if command.program is None:
        program, arg0, args = "/bin/sh", None, ("-c", HOSTS_PYTHON, sys.executable, *args)
    else:
        program, arg0 = command.program, command.arg0
    return host_mesh.BootstrapCommand(program, arg0, list(args), dict(command.env), command.inherit_env)


class ReadyMessage:
    """Takes the place of an endpoint's signature, to make a call send a message that exists already."""

    def __init__(self, message: Any) -> None:
        self.message = message


def _send_ready_messages(actor_mesh: Any) -> None:
    """Makes ``ActorEndpoint`` send a ``ReadyMessage``. Call it before the first call of an endpoint."""
    create = actor_mesh._create_endpoint_message

    def create_or_take(method: Any, signature: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(signature, ReadyMessage):
            return signature.message
        return create(method, signature, *args, **kwargs)

    actor_mesh._create_endpoint_message = create_or_take


async def _report_of(call: Any) -> Any:
    try:
        return await call
    except RuntimeError as error:
        if hasattr(type(error), "endpoint"):
            error.endpoint = None  # type: ignore[attr-defined]  # the client names the call
        raise


class _ActorMesh:
    """Unpickles as an ``ActorMesh`` whose class only the worker can import."""

    __slots__ = ("_fields",)

    def __init__(self, class_data: Fragments, name: str, actors: Any, shape: Any, procs: Any) -> None:
        self._fields = (Forward(class_data), name, actors, shape, procs)

    def __reduce__(self) -> tuple[Any, ...]:
        from monarch._src.actor.actor_mesh import ActorMesh  # noqa: PLC0415 - loaded by Client

        return ActorMesh, self._fields


def service_address(host: Host) -> str:
    return host.address


def attach_natively(
    name: str,
    hosts: Sequence[Host],
    transport: str | None,
    address_of: Callable[[Host], str] = service_address,
) -> Any:
    """Monarch's own mesh of ``hosts``, in a process that is not an engine: a program that was submitted to the job.

    Attaching hands settings to the hosts, where they hold for other sessions too, so they are those of an engine.
    """
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    import monarch.actor as api  # noqa: PLC0415 - Monarch reads the environment when it is imported
    from monarch import config  # noqa: PLC0415

    config.configure(**SETTINGS)
    if transport is not None:
        api.enable_transport(transport)
    workers = [address_of(host) for host in hosts]
    return api.attach_to_workers(name=name, ca="trust_all_connections", workers=workers)


class Client:
    """Implements ``interface.Monarch``, which documents the methods."""

    controllers_class: ClassVar[bytes] = b"cmonarch._src.actor.proc_mesh\n_ControllerController\n."
    sync_context: ClassVar[str] = "monarch._src.actor.sync_state:fake_sync_state"
    log_prefix: ClassVar[str] = "monarch._src.actor.config:prefix_python_logs_with_actor"

    def __init__(self, transport: str | None, on_fault: OnFault) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        change_cloudpickle()
        import monarch.actor as api  # noqa: PLC0415 - Monarch reads the environment when it is imported
        from monarch import config  # noqa: PLC0415
        from monarch._rust_bindings.monarch_hyperactor import actor, buffers, mailbox  # noqa: PLC0415
        from monarch._rust_bindings.monarch_hyperactor import pickle as monarch_pickle  # noqa: PLC0415
        from monarch._rust_bindings.monarch_hyperactor.endpoint import ActorEndpoint  # noqa: PLC0415
        from monarch._rust_bindings.monarch_hyperactor.proc_mesh import ProcMesh  # noqa: PLC0415
        from monarch._src.actor import actor_mesh  # noqa: PLC0415

        by_value = (
            *(batches, breakpoints, kept_references, kept_values, large_messages, output_marks, ports),
            *(running_calls, stacks),
        )
        for module in (on_worker, control_groups, place, *by_value, tracing):
            cloudpickle.register_pickle_by_value(module)
        self._api, self._actor, self._buffers, self._mailbox = api, actor, buffers, mailbox
        self._pickle, self._actor_mesh, self._native_procs = monarch_pickle, actor_mesh, ProcMesh
        config.configure(**SETTINGS)
        self._actor_endpoint = ActorEndpoint
        self._no_extent = _native_region(Region(labels=(), offset=0, sizes=(), strides=())).as_shape()
        _send_ready_messages(actor_mesh)
        if transport is not None:
            api.enable_transport(transport)
        api.unhandled_fault_hook = lambda failure: on_fault(_fault(failure))
        self._instance = api.context().actor_instance
        self._controllers: Any = self._instance._controller_controller
        self._native = self._instance._as_rust()
        self._ports = self._instance._mailbox
        self.root = str(self._instance.actor_id)
        self._kinds = {"sync": actor.ActorKind.SYNC, "async": actor.ActorKind.ASYNC}
        self._exception = actor.PythonMessageKind.Exception
        self._call_method = actor.PythonMessageKind.CallMethod
        self._returns_response = actor.MethodSpecifier.ReturnsResponse
        self._explicit_port = actor.MethodSpecifier.ExplicitPort
        self._batch = actor.MethodSpecifier.ReturnsResponse(batches.METHOD)
        nothing = buffers.Buffer()
        nothing.write(pickle.dumps(None))
        self._no_state = actor.PythonMessage(actor.PythonMessageKind.Result(None), nothing.freeze(), [])

        self.same_versions = SameVersions()
        self.same_versions.check_before(actor_mesh.ActorInitArgs)
        self._settings = MonarchSettings()
        self._collects = False  # telemetry, which has a row for each message and names its endpoint

    async def configure(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return await self._settings.configure(settings)

    async def settings_applied(self) -> None:
        await self._settings.wait_applied()

    def collector(self, retention: int, host_metrics: float, gpu_metrics: float) -> Collector:
        self._collects = True
        return Collector(self._instance, retention)

    # --- meshes -----------------------------------------------------------------------------------------

    def attach(self, name: str, hosts: Sequence[Host]) -> Any:
        self._settings.withhold()
        mesh = self._api.attach_to_workers(
            name=name, ca="trust_all_connections", workers=[self._service_address(host) for host in hosts]
        )
        self._settings.attaching(self.wait_initialized(mesh))
        return mesh

    def _service_address(self, host: Host) -> str:
        return service_address(host)

    def spawn_procs(
        self, hosts: Any, per_host: Mapping[str, int], name: str, bootstrap: Any, launch: Launch | None = None
    ) -> Any:
        launch = launch or Launch()
        return hosts.spawn_procs(
            per_host=dict(per_host),
            bootstrap=bootstrap,
            name=name,
            proc_bind=[dict(each) for each in launch.binding] or None,
            bootstrap_command=native_commands(launch),
        )

    def with_python(self, hosts: Any, python: str) -> Any:
        return hosts.with_python_executable(python)

    def spawn_actors(
        self,
        procs: Any,
        name: str,
        class_name: str,
        kind: Literal["sync", "async"],
        class_data: Fragments,
        arguments: Any,
    ) -> Any:
        """As ``ProcMesh.spawn``, which would need the class itself."""
        init = self._actor_mesh.ActorInitArgs(
            ForwardClass(class_data, class_name),
            procs,
            self._controllers,
            name,
            self._instance._as_creator(),
            ForwardItem(arguments, 0),
        )
        state = self._pickle.pickle(
            ((init,), ForwardItem(arguments, 1)), allow_tensor_engine_references=True, allow_mesh_references=True
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

    def find_controllers_at(self, address: str, secret: str) -> None:
        self._controllers = on_worker.Controllers(address, secret)

    def spawn_engine_actors(self, procs: Any, name: str, class_name: str, *args: Any) -> Any:
        from meshgate_gateway.engine.on_worker import code_actors  # noqa: PLC0415 - it imports Monarch

        cloudpickle.register_pickle_by_value(code_actors)
        Class = getattr(code_actors, class_name)
        kind: Literal["sync", "async"] = "async" if Class is code_actors.KeptValuesActor else "sync"
        class_data = [cloudpickle.dumps(Class)]
        return self.spawn_actors(procs, name, class_name, kind, class_data, self.engine_payload(*args))

    def process_ids(self, procs: Any) -> tuple[str, ...]:
        return tuple(PROCESS_ID.findall(repr(procs._proc_mesh.poll())))

    def slice_mesh(self, mesh: Any, region: Region) -> Any:
        return mesh._new_with_shape(_native_region(region).as_shape())

    def slice_actors(self, actors: Any, region: Region) -> Any:
        return actors.new_with_region(_native_region(region))

    async def wait_initialized(self, mesh: Any) -> None:
        try:
            await mesh.initialized
        except self._api.ActorError as error:
            raise BootstrapFailed(error.exception_formatted) from error

    async def wait_actors_initialized(self, actors: Any) -> str:
        await actors.initialized().as_asyncio()
        name: str = await actors.name().as_asyncio()
        return name

    async def stop_actors(self, actors: Any, reason: str) -> None:
        await actors.stop(self._native, reason).as_asyncio()

    async def stop_procs(self, procs: Any, reason: str) -> None:
        await procs.stop(reason)

    async def stop_hosts(self, hosts: Any) -> None:
        await hosts.stop()

    async def shut_down_hosts(self, hosts: Any) -> None:
        await hosts.shutdown()

    # --- messages ---------------------------------------------------------------------------------------

    def payload(self, data: Fragments, buffers: Sequence[Fragments] = (), objects: Sequence[Any] = ()) -> Any:
        return Forward(data, buffers, objects)

    def engine_payload(self, *args: Any, objects: Sequence[Any] = ()) -> Any:
        if objects:
            return Forward([dumps_with_objects((args, {}), objects)], (), objects)
        return Forward([pickle.dumps((args, {}))])

    def payload_at(self, payload: Forward, position: int, region: Region) -> Any:
        return ForwardAt(payload, position, region.labels, region.sizes, CONTEXT)

    def payload_with_trace(self, payload: Forward | ForwardAt | OnProcess, trace: Mapping[str, str]) -> Any:
        return ForwardWithTrace(payload, trace, SPAN_FUNCTIONS, CONTEXT)

    def payload_keeping(self, payload: Forward | OnProcess, number: int, label: str) -> Any:
        return OnProcess(STORE, "keep", payload, number, label, size=payload.size)

    def payload_making_room(self, payload: Forward, numbers: Sequence[int]) -> Any:
        return OnProcess(STORE, "make_room", payload, numbers, size=payload.size)

    def kept_argument(self, delivery: int, argument: int) -> Any:
        return OnProcess(STORE, "take", delivery, argument)

    def kept_reference(
        self,
        number: int,
        label: str,
        places: Sequence[tuple[int, int]],
        at: int | None,
        whole: Region | None,
        passed: tuple[int, int, int] | None,
    ) -> Any:
        module = kept_references.MODULE
        if whole is not None:
            return OnProcess(module, "refer_to_all", number, label, places, whole.labels, whole.sizes, passed)
        return OnProcess(module, "refer", number, label, places, at, passed)

    def cast(self, actors: Any, endpoint: str, explicit_port: bool, payload: Any, port: Any | None) -> None:
        if self._settings.limits_frames:
            self._settings.check_frame(payload.size)
        method = self._explicit_port(endpoint) if explicit_port else self._returns_response(endpoint)
        actors.cast_unresolved(self._message(self._call_method(method, port, None), payload), "all", self._native)

    def call(
        self, actors: Any, endpoint: str, explicit_port: bool, payload: Any, number: int = 0, *, several: bool = False
    ) -> Any:
        """As ``cast`` to a new port, in one step: every call passes here."""
        if self._settings.limits_frames:
            self._settings.check_frame(payload.size)
        port, receiver = self._reply_port(several, explicit_port)
        method = self._explicit_port(endpoint) if explicit_port else self._returns_response(endpoint)
        message = self._message(self._call_method(method, port, None), payload, number)
        actors.cast_unresolved(message, "all", self._native)
        return receiver

    def size_in_batch(self, payload: Any) -> int | None:
        if type(payload) is not Forward or payload.buffers or payload.objects:
            return None
        if self._settings.limits_frames or self._collects:
            return None
        return sum(map(len, payload.data))

    def call_batch(self, actors: Any, calls: Sequence[tuple[str, Any, int]]) -> Any:
        port, receiver = self.open_port()
        payload = [(endpoint, b"".join(arguments.data), number) for endpoint, arguments, number in calls]
        kind = self._call_method(self._batch, port, None)
        actors.cast_unresolved(self._message(kind, Forward([pickle.dumps(payload)])), "all", self._native)
        return receiver

    def call_supervised(
        self, actors: Any, endpoint: str, explicit_port: bool, payload: Any, number: int = 0, *, several: bool = False
    ) -> tuple[Any, asyncio.Future[Any]]:
        """Only a call of the library's own subscribes to the owner's reports. Replies go to the engine's port and not
        to that call, which therefore ends with a report alone."""
        if self._settings.limits_frames:
            self._settings.check_frame(payload.size)
        port, receiver = self._reply_port(several, explicit_port)
        method = self._explicit_port(endpoint) if explicit_port else self._returns_response(endpoint)
        message = ReadyMessage(self._message(self._call_method(method, port, None), payload, number))
        call = self._actor_endpoint(actors, self._returns_response(endpoint), self._no_extent, "", message).call()
        return receiver, asyncio.ensure_future(_report_of(call))

    def _message(self, kind: Any, payload: Forward | ForwardAt | ForwardWithTrace | OnProcess, number: int = 0) -> Any:
        """``number`` is that of the call in the session, by which it can be cancelled; 0: it cannot."""
        if isinstance(payload, Forward) and not payload.buffers and not payload.objects:
            frozen = self._buffers.Buffer()
            if number:
                frozen.write(number.to_bytes(8, "little").join(MARK))
            for fragment in payload.data:
                frozen.write(fragment)
            return self._pickle.PendingMessage(kind, self._pickle.PicklingState(frozen.freeze()))
        if number:
            payload = OnProcess(f"{running_calls.MODULE}:calls", "mark", number, payload, size=payload.size)
        content = Large(payload) if payload.size >= LARGE else payload
        state = self._pickle.pickle(content, allow_tensor_engine_references=True, allow_mesh_references=True)
        return self._pickle.PendingMessage(kind, state)

    async def call_engine_actors(self, actors: Any, count: int, endpoint: str, *args: Any) -> list[Any]:
        port, receiver = self.open_port()
        kind = self._call_method(self._returns_response(endpoint), port, None)
        actors.cast_unresolved(self._message(kind, self.engine_payload(*args)), "all", self._native)
        values: dict[int, Any] = {}
        for _ in range(count):
            reply = self.reply_of(await self.receive(receiver))
            value = pickle.loads(reply.data)
            if reply.exception:
                raise value
            values[reply.rank or 0] = value
        return [values[rank] for rank in range(count)]

    def open_port(self) -> tuple[Any, Any]:
        handle, native = self._ports.open_port()
        return handle.bind(), (handle, native)

    def _reply_port(self, several: bool, explicit_port: bool) -> tuple[Any, Any]:
        """A port for one reply of one rank is for one message: Monarch passes it to the process as it is. Otherwise it
        opens ports on the way, which take 1.3 kB here and 0.4 kB there until the processes end."""
        if several:
            return self._open_port_for_several()
        if explicit_port:
            return self.open_port()
        handle, native = self._ports.open_once_port()
        port = handle.bind()
        return port, (port, native)

    def _open_port_for_several(self) -> tuple[Any, Any]:
        """A port whose messages are received with a wake-up for many instead of one for each. It queues its state with
        each message and nothing takes that, so it is for one reply of each rank."""
        messages = Messages(asyncio.get_running_loop(), self._no_state)
        handle, native = self._ports.open_accum_port(messages)
        return handle.bind(), (messages, native)  # the port closes when ``native`` is dropped

    def port_name(self, port: Any) -> str:
        return str(port.port_id)

    def receive(self, receiver: Any) -> asyncio.Future[Any]:
        message: asyncio.Future[Any] = receiver[1].recv_task().spawn_handle().as_asyncio()
        return message

    def close(self, receiver: Any) -> None:
        sender = receiver[0]
        if not isinstance(sender, Messages):  # nothing else ends Monarch's task that waits, and has the port
            sender.send(self._native, self._no_state)

    def receive_several(self, receiver: Any) -> asyncio.Future[list[Any]]:
        messages: Messages = receiver[0]
        return messages.all()

    def reply_of(self, message: Any) -> Reply:
        kind = message.kind
        data, references = undecoded(message)
        rank, printed = kind.rank, None
        if rank is not None and rank >> output_marks.RANK_BITS:
            rank, printed = output_marks.without_mark(rank)
        return Reply(rank, isinstance(kind, self._exception), data, references, printed)

    def replies_of(self, message: Any) -> list[BatchedReply]:
        together = self.reply_of(message)
        rank, exception, data, references, printed = together
        if exception or bytes(data[: len(batches.MAGIC)]) != batches.MAGIC:
            return [BatchedReply(None, 0.0, together)]
        found = []
        for number, exception, seconds, part in batches.decode_replies(data):
            own = bytes(part) if len(part) <= COPY_LIMIT else part
            found.append(BatchedReply(number, seconds, Reply(rank, exception, own, references, printed)))
        return found

    def port_at(self, address: str) -> Any:
        return self._mailbox.PortRef(self._mailbox.PortId.from_string(address))

    def send_to_port(self, port: Any, payload: Any, *, return_undeliverable: bool = True) -> None:
        kind = self._actor.PythonMessageKind.Result(None)
        message = self._message(kind, payload).try_resolve_now()
        if message is None:
            raise ValueError("cannot send a mesh that is still coming up through a port: await its `initialized` first")
        port.return_undeliverable = return_undeliverable
        port.send(self._native, message)

    # --- meshes and ports in arguments, and those that workers return -------------------------------------

    def port_argument(self, port: Any) -> Any:
        return self._api.Port(port, self._native, None)

    def actors_argument(self, class_data: Fragments, name: str, actors: Any, region: Region, procs: Any) -> Any:
        return _ActorMesh(class_data, name, actors, _native_region(region).as_shape(), procs)

    def reference_from_bytes(self, kind: str, data: bytes) -> Any:
        from monarch._rust_bindings.monarch_hyperactor import actor_mesh, host_mesh, proc_mesh  # noqa: PLC0415

        read = {
            "hosts": host_mesh.py_host_mesh_from_bytes,
            "procs": proc_mesh.py_proc_mesh_from_bytes,
            "actors": actor_mesh.py_actor_mesh_from_bytes,
        }
        return read[kind](data)

    def dump_actors(self, class_data: Fragments, name: str, actors: Any, region: Region, procs: Any) -> bytes:
        return pickle.dumps(self.actors_argument(class_data, name, actors, region, procs))

    def adopt_hosts(self, reference: Any, region: Region) -> Any:
        from monarch._src.actor.host_mesh import HostMesh  # noqa: PLC0415 - loaded by Client

        return HostMesh._from_initialized_hy_host_mesh(reference, _native_region(region), False, False)

    def adopt_procs(self, reference: Any, hosts: Any, region: Region, root: Region) -> Any:
        from monarch._src.actor.proc_mesh import ProcMesh  # noqa: PLC0415 - loaded by Client

        return ProcMesh._from_initialized_hy_proc_mesh(reference, hosts, _native_region(region), _native_region(root))


class Messages:
    """The accumulator of a port, which Monarch calls on threads of its own, one message at a time.

    The port holds on to it and closes when its native receiver is dropped. So this must not refer to that receiver.
    The callbacks of a future may, so the caller cancels one that it no longer waits for.
    """

    reducer = None  # messages of many ranks are passed on one by one

    def __init__(self, loop: asyncio.AbstractEventLoop, no_state: Any) -> None:
        self.initial_state = no_state
        self._loop = loop
        self._queue: deque[Any] = deque()
        self._waiter: asyncio.Future[Any] | None = None
        self._all = False  # whether the waiter gets all messages, as a list
        self._delivering = False  # whether the loop is about to deliver

    def __call__(self, state: Any, message: Any) -> Any:
        self._queue.append(message)
        if not self._delivering:
            self._delivering = True
            self._loop.call_soon_threadsafe(self._deliver)
        return state

    def next(self) -> asyncio.Future[Any]:
        """A future of the next message. One at a time; what a cancelled one did not take stays."""
        self._waiter, self._all = waiter, _ = self._loop.create_future(), False
        self._deliver()
        return waiter

    def all(self) -> asyncio.Future[list[Any]]:
        """As ``next``, of the messages that are here, at least one."""
        self._waiter, self._all = waiter, _ = self._loop.create_future(), True
        self._deliver()
        return waiter

    def _deliver(self) -> None:
        self._delivering = False  # before looking: a message that arrives from now on is delivered by another call
        waiter = self._waiter
        if waiter is None or not self._queue:
            return
        self._waiter = None
        if waiter.cancelled():
            return
        if not self._all:
            waiter.set_result(self._queue.popleft())
            return
        messages = []
        while self._queue:
            messages.append(self._queue.popleft())
        waiter.set_result(messages)


_implements: type[Monarch] = Client
