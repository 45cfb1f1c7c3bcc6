"""Process meshes: where actors are spawned."""

from __future__ import annotations

import inspect
import logging
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from meshgate.actors import ActorClass, endpoints_of
from meshgate.calls import Acknowledgement, Gathering
from meshgate.errors import InvalidRequestError, StaleCodeWarning
from meshgate.future import FutureProxy
from meshgate.old_code import advice, of_script, renewed
from meshgate.pickling import dump_class, dumps_call, travels_by_value
from meshgate.proxies.actors import ActorMeshProxy
from meshgate.proxies.mesh import MeshProxy, Owned, require_name
from meshgate.shape import Shape
from meshgate.value_mesh import ValueMesh
from meshgate_wire.messages import Initialized, Reload, SpawnActors, Stop, stream_of

if TYPE_CHECKING:
    from meshgate.proxies.hosts import HostMeshProxy

__all__ = ["ProcMesh", "ProcMeshProxy", "class_of"]

T = TypeVar("T")

_STOPPED = "`ProcMesh` has already been stopped"
_classes: weakref.WeakKeyDictionary[type, ActorClass] = weakref.WeakKeyDictionary()


def class_of(Class: type) -> ActorClass:
    """``endpoints_of(Class)``, remembered. Raises ``ValueError`` for a class that cannot be spawned."""
    known = _classes.get(Class) if isinstance(Class, type) else None
    if known is None:
        known = endpoints_of(Class)
        _classes[Class] = known
    return known


class ProcMeshProxy(MeshProxy):
    """Processes on the hosts of a job. As an async context manager it stops them on exit."""

    _kind = "procs"

    def __init__(self, owned: Owned, shape: Shape, hosts: HostMeshProxy | None) -> None:
        super().__init__(owned, shape)
        self._hosts = hosts

    def spawn(self, name: str, Class: type[T], *args: Any, **kwargs: Any) -> T:
        """Spawns the actor ``Class(*args, **kwargs)`` in every process; returns at once, before it is made.

        What is returned is an ``ActorMeshProxy``, typed as the class so that its endpoints are known. Raises
        ``ValueError`` for a class that is no actor and ``TypeError`` for arguments that do not fit its constructor.
        """
        if self._owned.known.stopped:
            raise RuntimeError(_STOPPED)
        require_name(name)
        actor, by_value = _to_spawn(Class)
        _check_init(actor, args, kwargs)
        client = self._client
        client.require_same_python([f"class {actor.name}"] if by_value else [])
        class_data = dump_class(actor.Class, by_value=by_value)
        pickled = dumps_call(
            args, kwargs, client.resolve, called=f"{actor.name}.__init__", parameters=_parameters(actor.Class)
        )
        client.require_same_python(pickled.code)
        step = f"spawn({name!r}, {actor.name})"
        parents = (self._object, *(argument.ref.object for argument in pickled.arguments))
        known = client.objects.create("actors", name, step, parents)
        header = SpawnActors(
            object=known.number,
            procs=self._ref,
            name=name,
            class_name=actor.name,
            kind=actor.kind,
            arguments=pickled.arguments,
            version=client.code_version,
            paths=client.code_paths,
        )
        client.post(header, (class_data, pickled.data, *pickled.buffers), stream=stream_of(known.number))
        mesh = ActorMeshProxy(Owned(client, known, self._shape), self._shape, actor, self)
        return cast("T", mesh)

    def reload(self) -> FutureProxy[ValueMesh[Any]]:
        """Brings these processes to the version that was synced last: modules that changed are reloaded, and those
        that import them, in order.

        Live objects keep the code they were made with; the report of each process says of which actor classes
        there are any (``old_classes``), with the reloaded ``modules`` and those whose files have ``vanished``.
        A slice reloads its own processes; so can those be reloaded that are left when some are dead.
        Raises ``InvalidRequestError`` where no code was synced.
        """
        client = self._client
        if client.code_version is None:
            raise InvalidRequestError("there is nothing to reload: job.sync() has not been called")
        version, paths = client.code_version, client.code_paths
        answer = Gathering(self._object, f"{self._owned.known.name}.reload", self._shape)
        client.ask(
            answer,
            lambda call: Reload(call=call, target=self._ref, version=version, paths=paths),
            stream=self._stream,
        )
        return answer.future

    def stop(self, reason: str = "stopped by client") -> FutureProxy[None]:
        """Stops the processes and their actors. Stopping them again is harmless; stopping a part fails, as in
        Monarch."""
        if not self._whole:
            return FutureProxy.failed(ValueError("ProcMesh is not owned; must be stopped by an owner"))
        known = self._owned.known
        self._client.stopped(known.number, reason)
        answer = Acknowledgement(self._object, f"{known.name}.stop")
        self._client.ask(
            answer,
            lambda call: Stop(call=call, target=self._ref, reason=reason),
            stream=self._stream,
            though_in_trouble=True,
        )
        return answer.future

    @property
    def initialized(self) -> FutureProxy[Literal[True]]:
        """Settles with True when all processes have come up."""
        answer = Acknowledgement(self._object, f"{self._owned.known.name}.initialized", True)
        self._client.ask(answer, lambda call: Initialized(call=call, target=self._ref), stream=self._stream)
        return answer.future

    @property
    def host_mesh(self) -> HostMeshProxy:
        """The host of a single process. Raises ``NotImplementedError`` for several, as Monarch does."""
        if len(self) != 1:
            raise NotImplementedError("`ProcMesh.host_mesh` is not yet supported for non-singleton proc meshes.")
        if self._hosts is None:
            raise RuntimeError(f"{self!r} came from an endpoint that did not say on which hosts it is")
        hosts = self._hosts
        each = len(self._owned.root) // len(hosts)
        base = hosts._ndslice.get(self._ndslice.get(0) // each)
        return hosts.slice(**hosts._shape.coordinates(base))

    async def logging_option(
        self, stream_to_client: bool = False, aggregate_window_sec: int | None = None, level: int = logging.INFO
    ) -> None:
        """Shows or hides what the processes print here. Lines arrive as they are printed and identical ones of one
        moment are folded, so ``aggregate_window_sec`` and ``level`` change nothing more."""
        if aggregate_window_sec is not None and not stream_to_client:
            raise ValueError("aggregate_window_sec needs stream_to_client=True")
        await self.initialized
        self._client.show_output(self._object, stream_to_client)

    async def __aenter__(self) -> ProcMeshProxy:
        if self._owned.known.stopped:
            raise RuntimeError(_STOPPED)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if not self._owned.known.stopped:
            await self.stop()

    def _part(self, shape: Shape) -> ProcMeshProxy:
        return ProcMeshProxy(self._owned, shape, self._hosts)

    def __repr__(self) -> str:
        return f"ProcMesh({self._owned.known.name!r}, {self._shape})"


ProcMesh = ProcMeshProxy  # Monarch's name, for annotations of programs that come from there


def _to_spawn(Class: type) -> tuple[ActorClass, bool]:
    """The class, which a reload may have made anew here, and whether it travels as code. Raises ``ValueError``."""
    actor = class_of(Class)
    if not travels_by_value(Class):
        return class_of(renewed(Class)), False
    script = of_script(Class)
    if script is not None:
        warnings.warn(
            f"{actor.name} runs as it was when this program was started, for it travels with the spawn; {script} was "
            "saved since. Start the program again, or define the class in a module, so that it is synced",
            StaleCodeWarning,
            stacklevel=3,
        )
    return actor, True


def _check_init(actor: ActorClass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        actor.check_init(args, kwargs)
    except TypeError as error:
        raise TypeError(f"{error}{advice(actor.Class)}") from None


def _parameters(Class: type) -> tuple[str, ...]:
    return tuple(inspect.signature(Class).parameters)
