"""Actor meshes: an attribute for each endpoint."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NoReturn

from meshgate.actors import ActorClass, EndpointSpec
from meshgate.calls import Acknowledgement
from meshgate.future import FutureProxy
from meshgate.old_code import advice, has_now
from meshgate.proxies.endpoints import EndpointProxy
from meshgate.proxies.mesh import MeshProxy, Owned
from meshgate.shape import Shape
from meshgate_wire.messages import Initialized, Stop

if TYPE_CHECKING:
    from meshgate.proxies.procs import ProcMeshProxy

__all__ = ["ActorMeshProxy", "NotAnEndpoint"]


class ActorMeshProxy(MeshProxy):
    """Actors of one class, one a process. Endpoints of the class are attributes: ``actors.step.call(1)``."""

    _kind = "actors"

    def __init__(self, owned: Owned, shape: Shape, actor: ActorClass, procs: ProcMeshProxy | None) -> None:
        super().__init__(owned, shape)
        self.__name__ = actor.Class.__name__
        self._actor = actor
        self._procs = procs

    @property
    def _class(self) -> type:
        return self._actor.Class

    @property
    def _mesh_name(self) -> str:
        return self._owned.known.name

    def __getattr__(self, attr: str) -> Any:
        # Reached once for each endpoint: what is found becomes an attribute proper.
        actor: ActorClass | None = self.__dict__.get("_actor")
        if actor is None or attr.startswith("__"):
            raise AttributeError(attr)
        spec = actor.endpoints.get(attr)
        if spec is not None:
            found: EndpointProxy[..., Any] = EndpointProxy(self, spec)
            self.__dict__[attr] = found
            return found
        if attr in dir(actor.Class):
            return NotAnEndpoint(self, attr)
        saved = advice(actor.Class) if has_now(actor.Class, attr) else ""
        raise AttributeError(f"{actor.name} has no endpoint {attr!r}{saved}", name=attr, obj=self)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._actor.endpoints]

    def stop(self, reason: str = "stopped by client") -> FutureProxy[None]:
        """Stops the actors. Stopping them again is harmless; stopping a part fails, as in Monarch."""
        if not self._whole:
            message = "Cannot call stop on an ActorMeshRef, requires an owned ActorMesh"
            return FutureProxy.failed(NotImplementedError(message))
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
    def initialized(self) -> FutureProxy[None]:
        """Settles when the actors have been made."""
        answer = Acknowledgement(self._object, f"{self._mesh_name}.initialized")
        self._client.ask(answer, lambda call: Initialized(call=call, target=self._ref), stream=self._stream)
        return answer.future

    def _part(self, shape: Shape) -> ActorMeshProxy:
        return ActorMeshProxy(self._owned, shape, self._actor, self._procs)

    def __repr__(self) -> str:
        return f"ActorMesh(class={self._class}, shape={self._shape})"


class NotAnEndpoint:
    """A method of an actor class that is not an endpoint; ``as_endpoint`` makes it callable."""

    def __init__(self, ref: ActorMeshProxy, name: str) -> None:
        self._ref = ref
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"Actor {self._ref._class}.{self._name} is not annotated as an endpoint. To call it as one, add a "
            "@endpoint decorator to it, or directly wrap it in one as_endpoint(obj.method).call(...)"
        )

    def __as_endpoint__(self, *, explicit_response_port: bool = False) -> EndpointProxy[..., Any]:
        method = getattr(self._ref._class, self._name)
        spec = EndpointSpec(
            name=self._name,
            signature=inspect.signature(method),
            explicit_response_port=explicit_response_port,
            is_async=inspect.iscoroutinefunction(method),
            placeholders=2 if explicit_response_port else 1,
        )
        return EndpointProxy(self._ref, spec)
