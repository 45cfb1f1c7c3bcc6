"""Host meshes, where processes are spawned, and process meshes, where actors are spawned.

They share a module because each names the other: hosts spawn processes, and a process knows its host.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property
from typing import Any, Literal, ParamSpec, TypeVar, cast

from meshgate.errors import InvalidRequestError, UnpicklableArgument
from meshgate.monarch_classes import SeenAsMonarchs
from meshgate.proxies.actor_mesh import ActorMeshProxy, actor_class_to_spawn, check_init, parameters_of, signatures_of
from meshgate.proxies.kept import KeptMesh, put_value, use_in_call
from meshgate.proxies.launch import BootstrapCommand, launch_of
from meshgate.proxies.mesh import MeshProxy, OwnedObject, require_name, require_string
from meshgate.serialization.pickling import dump_class, dumps, dumps_call
from meshgate.session.futures import FutureProxy
from meshgate.session.objects import EndingHost
from meshgate.session.pending_calls import PendingAck, PendingValueMesh
from meshgate.session.session import ClientSession
from meshgate.shapes.shape import Extent, Point, Region, Shape
from meshgate.shapes.value_mesh import ValueMesh
from meshgate_wire.fragments import flatten
from meshgate_wire.messages import MAX_PER_HOST, Initialized, MeshRef, Reload, SpawnActors, SpawnProcs, stream_of

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")

_SHUT_DOWN = "HostMesh has already been shut down"
_STOPPED = "`ProcMesh` has already been stopped"


class ProcMeshProxy(SeenAsMonarchs, MeshProxy):
    """Processes on the hosts of a job. As an async context manager it stops them on exit."""

    _kind = "procs"
    _monarch_name = "ProcMesh"

    def __init__(self, owned: OwnedObject, shape: Shape, hosts: HostMeshProxy | None) -> None:
        super().__init__(owned, shape)
        self._hosts = hosts
        self._log_level = logging.INFO

    def spawn(self, name: str, Class: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Spawns the actor ``Class(*args, **kwargs)`` in every process. Returns at once, before it is initialized.

        Returns an ``ActorMeshProxy``, typed as the class so that type checkers know its endpoints, and check the
        arguments of its constructor. Raises ``ValueError`` if the class is not an actor, and ``TypeError`` if the
        arguments do not fit its constructor.
        """
        if self._owned.remote.stopped:
            raise RuntimeError(_STOPPED)
        require_name(name)
        actor, by_value = actor_class_to_spawn(cast("type", Class))
        check_init(actor, args, kwargs)
        client = self._client
        class_data = dump_class(actor.Class, by_value, client.worker_python)
        pickled = dumps_call(
            args,
            kwargs,
            client.resolve,
            called=f"{actor.name}.__init__",
            parameters=parameters_of(actor.Class),
            worker_python=client.worker_python,
        )
        step = f"spawn({name!r}, {actor.name})"
        # Actors do not depend on kept values once they have taken them.
        needed = (argument.ref.object for argument in pickled.arguments if argument.kind != "kept")
        parents = (self._object, *needed)
        remote = client.objects.create("actors", name, step, parents)
        if pickled.arguments:
            label, stream = f"{name}.__init__", stream_of(remote.number)
            use_in_call(client, pickled.arguments, self._shape, label, stream, answered=False)
        header = SpawnActors(
            object=remote.number,
            procs=self._ref,
            name=name,
            class_name=actor.name,
            kind=actor.kind,
            arguments=pickled.arguments,
            version=client.code_version,
            paths=client.code_paths,
            endpoints=signatures_of(actor),
        )
        client.post(header, (class_data, pickled.data, *pickled.buffers), stream=stream_of(remote.number))
        mesh = ActorMeshProxy(OwnedObject(client, remote, self._shape), self._shape, actor, self)
        return cast("T", mesh)

    def put(self, value: R) -> KeptMesh[R]:
        """Sends ``value`` over this machine's link once, to stay in each process, and returns at once.

        Calls can then take it as an argument: each process that has it uses its own, without a copy. Raises
        ``UnpicklableArgument``.
        """
        return put_value(self, value)

    def reload(self) -> FutureProxy[ValueMesh[Any]]:
        """Reloads the modules that the latest sync changed, and those that import them, in order.

        Live objects keep their old code. The report of each process lists the actor classes that have such objects
        (``old_classes``), the reloaded ``modules``, and modules that can no longer be imported (``vanished``). A slice
        reloads its own processes only, so the living ones can be reloaded when others are dead.

        Raises ``InvalidRequestError`` if no code was synced.
        """
        client = self._client
        if client.code_version is None:
            raise InvalidRequestError("no code was synced, so there is nothing to reload: call job.sync() first")
        version, paths = client.code_version, client.code_paths
        reports = PendingValueMesh(self._object, f"{self._name or 'procs'}.reload", self._shape)
        client.request(
            reports,
            lambda call: Reload(call=call, target=self._ref, version=version, paths=paths),
            stream=self._stream,
        )
        return reports.future

    def setup_torch(self, master_addr: str | None = None, master_port: int = 0) -> None:
        """Sets torchrun's variables in every process, so that ``torch.distributed.init_process_group()`` works in
        actors with no further step. Waits until they are set.

        The processes are the ranks of one group; a slice is a group of its own. Rank 0 serves at ``master_addr``
        (default: its own address) and ``master_port`` (default: a free port), which is held for it. Raises ValueError
        if that is not possible.
        """
        from meshgate.proxies.process_settings import TorchEnvironment, set_up_ranks  # noqa: PLC0415 - few use it

        set_up_ranks(self.spawn("torch_environment", TorchEnvironment), master_addr, master_port)

    def stop(self, reason: str = "stopped by client") -> FutureProxy[None]:
        """Stops the processes and their actors. Stopping them again does nothing; stopping a slice fails, as in
        Monarch."""
        if not self._can_stop:
            return FutureProxy.failed(ValueError("ProcMesh is not owned; must be stopped by an owner"))
        require_string(reason, "the reason")
        return self._request_stop("stop", reason, mark=reason)

    @property
    def initialized(self) -> FutureProxy[Literal[True]]:
        """Settles with True when all processes are up."""
        ack = PendingAck(self._object, f"{self._name}.initialized", True)
        self._client.request(ack, lambda call: Initialized(call=call, target=self._ref), stream=self._stream)
        return ack.future

    @property
    def host_mesh(self) -> HostMeshProxy:
        """The host of a single process. Raises ``NotImplementedError`` for several, as Monarch does."""
        if len(self) != 1:
            raise NotImplementedError("`ProcMesh.host_mesh` is not yet supported for non-singleton proc meshes.")
        if self._hosts is None:
            raise RuntimeError(f"the hosts of {self!r} are unknown: an endpoint returned it without them")
        hosts = self._hosts
        procs_per_host = len(self._owned.shape) // len(hosts)
        base_rank = hosts._ndslice.get(self._ndslice.get(0) // procs_per_host)
        return hosts.slice(**hosts._shape.coordinates(base_rank))

    async def logging_option(
        self, stream_to_client: bool = False, aggregate_window_sec: int | None = None, level: int = logging.INFO
    ) -> None:
        """Shows or hides what the processes print.

        In each window of ``aggregate_window_sec`` seconds, lines that differ only in numbers are counted and shown
        once. Without it lines are shown as they are printed, those that several ranks print together once. ``level`` is
        that of the root logger in the processes, which stays as it is until a program asks for another than INFO.
        """
        if aggregate_window_sec is not None and not stream_to_client:
            raise ValueError("aggregate_window_sec needs stream_to_client=True")
        await self.initialized
        if level != self._log_level:
            from meshgate.proxies.process_settings import LogLevel  # noqa: PLC0415 - few use it

            await self.spawn("logging_option", LogLevel).set.call(level)
            self._log_level = level
        self._client.show_output(self._object, stream_to_client, aggregate_window_sec)

    async def __aenter__(self) -> ProcMeshProxy:
        if self._owned.remote.stopped:
            raise RuntimeError(_STOPPED)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if not self._owned.remote.stopped:
            await self.stop()

    def _host_name(self, rank: int) -> str:
        if self._hosts is None:
            return ""
        procs_per_host = len(self._owned.shape) // len(self._hosts)
        return self._hosts._host_name(self._hosts._ndslice.get(rank // procs_per_host))

    def _parts(self) -> tuple[Any, ...]:
        return (self._hosts,)

    def _with_shape(self, shape: Shape) -> ProcMeshProxy:
        return ProcMeshProxy(self._owned, shape, self._hosts)

    def __repr__(self) -> str:
        return f"ProcMesh({self._name!r}, {self._shape})"


class HostMeshProxy(SeenAsMonarchs, MeshProxy):
    """Hosts of a job. As an async context manager it shuts them down on exit."""

    _kind = "hosts"
    _monarch_name = "HostMesh"
    _python: str | None = None  # None: the Python of the hosts

    @property
    def region(self) -> Region:
        """The region of these hosts' ranks."""
        return self._shape.region

    @property
    def _labels(self) -> tuple[str, ...]:
        return tuple(self._shape.labels)

    @property
    def stream_logs(self) -> bool:
        """False, as for the hosts of Monarch's jobs. What processes print arrives regardless; ``logging_option`` of a
        proc mesh hides it."""
        return False

    @property
    def is_fake_in_process(self) -> bool:
        """False: hosts are never simulated in the program's process."""
        return False

    def spawn_procs(
        self,
        per_host: dict[str, int] | None = None,
        bootstrap: Callable[[], None] | Callable[[], Awaitable[None]] | None = None,
        name: str | None = None,
        proc_bind: list[dict[str, str]] | None = None,
        bootstrap_command: BootstrapCommand | Callable[[Point], BootstrapCommand] | None = None,
    ) -> ProcMeshProxy:
        """Spawns processes on every host. Returns at once, before they are up.

        ``per_host`` is the shape of the processes on each host, such as ``{"gpus": 4}``; the default is one process.
        ``bootstrap`` runs first in each process. ``proc_bind`` binds each process of a host to CPUs or NUMA nodes.
        ``bootstrap_command`` starts the processes; a function returns the command for each point of the new mesh.
        Raises ``ValueError`` if ``per_host`` uses a label of the hosts, or ``proc_bind`` has another length.
        """
        self._require_up()
        per_host = _per_host(per_host)
        name = name or "anon"
        require_name(name)
        labels = tuple(self._shape.labels)
        if set(per_host) & set(labels):
            raise ValueError(f"per_host labels {list(per_host)} overlap with host labels {labels}")
        extent = Extent((*labels, *per_host), (*self._ndslice.sizes, *per_host.values()))
        launch = launch_of(extent, per_host, proc_bind, bootstrap_command)
        client = self._client
        buffers = (_pickle_bootstrap(bootstrap, client),) if bootstrap is not None else ()
        step = f"spawn_procs({per_host}, name={name!r})"
        remote = client.objects.create("procs", name, step, (self._object,))
        header = SpawnProcs(
            object=remote.number,
            hosts=self._ref,
            per_host=per_host,
            name=name,
            launch=launch,
            version=client.code_version,
            paths=client.code_paths,
        )
        client.post(header, buffers, stream=stream_of(remote.number))
        shape = shape_of_procs(self._shape, per_host)
        return ProcMeshProxy(OwnedObject(client, remote, shape), shape, self)

    def spawn(self, name: str, Class: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Spawns one process on each host, and in it the actor ``Class(*args, **kwargs)``."""
        return self.spawn_procs(name=name).spawn(name, Class, *args, **kwargs)

    def shutdown(self) -> FutureProxy[None]:
        """Ends the host processes, for every client. Raises ``RuntimeError`` for a slice of the mesh."""
        return self._end(shutdown=True)

    def stop(self) -> FutureProxy[None]:
        """Stops what this session runs on the hosts, which stay up. Raises ``RuntimeError`` for a slice of the mesh."""
        return self._end(shutdown=False)

    def with_python_executable(self, python_executable: str) -> HostMeshProxy:
        """The same hosts; processes are spawned on them with this Python, also by actors in such processes."""
        hosts = self._with_shape(self._shape)
        hosts._python = require_string(python_executable, "the path of a Python executable")
        return hosts

    def _end(self, *, shutdown: bool) -> FutureProxy[None]:
        self._require_up()
        verb = "shut down" if shutdown else "stop"
        if not self._is_whole:
            raise RuntimeError(f"cannot {verb} {self!r}, which is a slice of a host mesh: {verb} the whole mesh")
        if self._is_reference:
            raise RuntimeError(f"cannot {verb} `HostMesh` that is a reference instead of owned: {verb} the original")
        mark = "the hosts were shut down" if shutdown else ""
        return self._request_stop(verb.replace(" ", ""), f"{verb} by client", mark=mark, shutdown=shutdown)

    @property
    def initialized(self) -> FutureProxy[Literal[True]]:
        """Settles with True when all hosts have answered, also restarted ones and those that replace ``ending`` ones.
        Fails if a host has ended for good."""
        return self._initialized(wait_for_all=True)

    @property
    def ending(self) -> tuple[EndingHost, ...]:
        """Those of these hosts that the cluster is going to end, or has ended, in rank order, until others have their
        places (``initialized``). Kubernetes gives such notice, and Slurm before the time limit of the job, when no
        others follow; what runs on them can go on until the deadline."""
        ending = self._owned.remote.ending
        names = (self._host_name(self._ndslice.get(at)) for at in range(len(self))) if ending else ()
        return tuple(ending[name] for name in names if name in ending)

    def _initialized(self, *, wait_for_all: bool) -> FutureProxy[Literal[True]]:
        """Without ``wait_for_all`` it does not wait for hosts that have ended, only for reports about them so far."""
        ack = PendingAck(self._object, f"{self._name}.initialized", True)
        target = self._ref
        self._client.request(
            ack, lambda call: Initialized(call=call, target=target, whole=wait_for_all), stream=self._stream
        )
        return ack.future

    def is_usable_in(self, session: ClientSession) -> bool:
        """Whether it is a mesh of ``session`` that has neither failed nor been shut down."""
        return self._client is session and session.objects.failure_of(self._object) is None

    async def __aenter__(self) -> HostMeshProxy:
        self._require_up()
        return self

    async def __aexit__(self, *exc: object) -> None:
        if not self._owned.remote.stopped:
            await self.shutdown()

    def _require_up(self) -> None:
        if self._owned.remote.stopped:
            raise RuntimeError(_SHUT_DOWN)

    @cached_property
    def _ref(self) -> MeshRef:
        return super()._ref.model_copy(update={"python": self._python})

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        function, arguments, state = super().__reduce_ex__(protocol)
        return function, arguments, {**state, "_python": self._python}

    def _host_name(self, rank: int) -> str:
        hosts = self._owned.remote.hosts
        return hosts[rank].name if rank < len(hosts) else ""

    def _with_shape(self, shape: Shape) -> HostMeshProxy:
        hosts = HostMeshProxy(self._owned, shape)
        hosts._python, hosts._is_reference = self._python, self._is_reference
        return hosts

    def __repr__(self) -> str:
        return f"HostMesh({self._name!r}, {self._shape})"


def _per_host(given: Any) -> dict[str, int]:
    """The argument of ``spawn_procs``. Raises ``TypeError`` or ``ValueError``."""
    example = 'expected a number of processes for each dimension, such as {"gpus": 2}'
    try:
        per_host = dict(given or {})
    except (TypeError, ValueError) as error:
        raise type(error)(f"per_host is {given!r}: {example}") from None
    for label, count in per_host.items():
        if not isinstance(label, str):
            raise TypeError(f"per_host has the key {label!r}: {example}")
        require_name(label, "a dimension of per_host")
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"per_host[{label!r}] is {count!r}: expected a number of processes, at least 1")
        if count > MAX_PER_HOST:
            raise ValueError(
                f"per_host[{label!r}] is {count}: gateways accept at most {MAX_PER_HOST} processes in a dimension, so "
                "that a wrong number cannot exhaust the memory of hosts. A process takes about 60 MB"
            )
    return per_host


def shape_of_procs(hosts: Shape, per_host: Mapping[str, int]) -> Shape:
    """The shape of the processes on ``hosts``."""
    extent = Extent((*hosts.labels, *per_host), (*hosts.ndslice.sizes, *per_host.values()))
    return extent.region.as_shape()


# Monarch's names, for annotations in ported programs.
HostMesh = HostMeshProxy
ProcMesh = ProcMeshProxy


def _pickle_bootstrap(bootstrap: Callable[[], Any], session: ClientSession) -> bytes:
    pickled = dumps(bootstrap, worker_python=session.worker_python)
    if pickled.buffers:
        size = sum(flatten(buffer)[0] for buffer in pickled.buffers)
        raise UnpicklableArgument(
            f"bootstrap contains {size / 1e6:.1f} MB of arrays or bytes; pass data to an actor instead",
            argument="bootstrap",
        )
    return pickled.data
