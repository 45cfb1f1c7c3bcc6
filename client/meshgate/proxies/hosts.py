"""Host meshes: where processes are spawned."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from meshgate.calls import Acknowledgement
from meshgate.errors import InvalidRequestError, UnpicklableArgument
from meshgate.extent import Extent
from meshgate.future import FutureProxy
from meshgate.pickling import dumps
from meshgate.proxies.mesh import MeshProxy, Owned, require_name
from meshgate.proxies.procs import ProcMeshProxy
from meshgate.shape import Shape
from meshgate_wire.fragments import flatten
from meshgate_wire.messages import Initialized, SpawnProcs, Stop, stream_of

if TYPE_CHECKING:
    from meshgate.client import Client

__all__ = ["HostMesh", "HostMeshProxy"]

T = TypeVar("T")

_SHUT_DOWN = "HostMesh has already been shut down"


class HostMeshProxy(MeshProxy):
    """Hosts of a job. As an async context manager it shuts them down on exit."""

    _kind = "hosts"

    def spawn_procs(
        self,
        per_host: dict[str, int] | None = None,
        bootstrap: Callable[[], None] | Callable[[], Awaitable[None]] | None = None,
        name: str | None = None,
        proc_bind: list[dict[str, str]] | None = None,
        bootstrap_command: Any = None,
    ) -> ProcMeshProxy:
        """Spawns processes on every host; returns at once, before they are up.

        ``per_host`` is the shape of the processes on each host, ``{"gpus": 4}``; without it there is one.
        ``bootstrap`` runs in each process before anything else. Raises ``ValueError`` where a label of ``per_host``
        is one of the hosts' own.
        """
        self._require_up()
        per_host = dict(per_host or {})
        name = name or "anon"
        require_name(name)
        _refuse_unsupported(proc_bind=proc_bind, bootstrap_command=bootstrap_command)
        labels = tuple(self._shape.labels)
        if set(per_host) & set(labels):
            raise ValueError(f"per_host labels {list(per_host)} overlap with host labels {labels}")
        for label, count in per_host.items():
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ValueError(f"per_host[{label!r}] is {count!r}: expected a number of processes, at least 1")
        client = self._client
        buffers = (_pickled_bootstrap(bootstrap, client),) if bootstrap is not None else ()
        step = f"spawn_procs({per_host}, name={name!r})"
        known = client.objects.create("procs", name, step, (self._object,))
        header = SpawnProcs(
            object=known.number,
            hosts=self._ref,
            per_host=per_host,
            name=name,
            version=client.code_version,
            paths=client.code_paths,
        )
        client.post(header, buffers, stream=stream_of(known.number))
        extent = Extent((*labels, *per_host), (*self._ndslice.sizes, *per_host.values()))
        shape = extent.region.as_shape()
        return ProcMeshProxy(Owned(client, known, shape), shape, self)

    def spawn(self, name: str, Class: type[T], *args: Any, **kwargs: Any) -> T:
        """Spawns one process a host, and in each the actor ``Class(*args, **kwargs)``."""
        return self.spawn_procs(name=name).spawn(name, Class, *args, **kwargs)

    def shutdown(self) -> FutureProxy[None]:
        """Ends the host processes, for every client. Raises ``RuntimeError`` on a part of a mesh."""
        return self._end(shutdown=True)

    def stop(self) -> FutureProxy[None]:
        """Ends what this session has on the hosts, which stay for others. Raises ``RuntimeError`` on a part."""
        return self._end(shutdown=False)

    def _end(self, *, shutdown: bool) -> FutureProxy[None]:
        self._require_up()
        verb = "shut down" if shutdown else "stop"
        if not self._whole:
            raise RuntimeError(f"cannot {verb} {self!r}: it is a part of a host mesh; {verb} the whole")
        if shutdown:
            self._client.stopped(self._object, "the hosts were shut down")
        answer = Acknowledgement(self._object, f"{self._owned.known.name}.{verb.replace(' ', '')}")
        self._client.ask(
            answer,
            lambda call: Stop(call=call, target=self._ref, reason=f"{verb} by client", shutdown=shutdown),
            stream=self._stream,
            though_in_trouble=True,
        )
        return answer.future

    @property
    def initialized(self) -> FutureProxy[Literal[True]]:
        """Settles with True when the hosts have answered, those too that are made anew in the place of others. Fails
        where one has ended for good."""
        return self._up(whole=True)

    def _up(self, *, whole: bool) -> FutureProxy[Literal[True]]:
        """Without ``whole`` it does not wait for hosts that have ended: all that was told of them is known here."""
        answer = Acknowledgement(self._object, f"{self._owned.known.name}.initialized", True)
        target = self._ref
        self._client.ask(answer, lambda call: Initialized(call=call, target=target, whole=whole), stream=self._stream)
        return answer.future

    def is_usable_in(self, client: Client) -> bool:
        """Whether it is a mesh of ``client``'s session that neither failed nor was shut down."""
        return self._client is client and client.objects.trouble(self._object) is None

    async def __aenter__(self) -> HostMeshProxy:
        self._require_up()
        return self

    async def __aexit__(self, *exc: object) -> None:
        if not self._owned.known.stopped:
            await self.shutdown()

    def _require_up(self) -> None:
        if self._owned.known.stopped:
            raise RuntimeError(_SHUT_DOWN)

    def _part(self, shape: Shape) -> HostMeshProxy:
        return HostMeshProxy(self._owned, shape)

    def __repr__(self) -> str:
        return f"HostMesh({self._owned.known.name!r}, {self._shape})"


HostMesh = HostMeshProxy  # Monarch's name, for annotations of programs that come from there


def _refuse_unsupported(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise InvalidRequestError(
                f"spawn_procs({name}=...) is not available through a gateway: leave it out, or set the process up in "
                "`bootstrap`"
            )


def _pickled_bootstrap(bootstrap: Callable[[], Any], client: Client) -> bytes:
    pickled = dumps(bootstrap)
    client.require_same_python(pickled.code)
    if pickled.buffers:
        size = sum(flatten(buffer)[0] for buffer in pickled.buffers)
        raise UnpicklableArgument(
            f"bootstrap carries {size / 1e6:.1f} MB of arrays or bytes; pass data to an actor instead",
            argument="bootstrap",
        )
    return pickled.data
