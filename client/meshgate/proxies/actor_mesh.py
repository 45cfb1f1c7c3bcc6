"""Actor meshes, with an attribute for each endpoint.

The endpoints of a class also exist as data, from which a later holder of the session builds proxies without the class.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Sequence
from types import GenericAlias
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

from meshgate.actors import standins
from meshgate.actors.actor_class import ActorClass, EndpointSpec, endpoints_of, is_endpoint
from meshgate.caller import warn_caller
from meshgate.errors import StaleCodeWarning
from meshgate.monarch_classes import SeenAsMonarchs
from meshgate.proxies.endpoints import EndpointProxy
from meshgate.proxies.kept import KeptMesh, put_value
from meshgate.proxies.mesh import MeshProxy, OwnedObject, require_string
from meshgate.serialization.pickling import pickled_by_value
from meshgate.serialization.stale_source import changed_script, current_class, restart_hint, source_defines
from meshgate.session.futures import FutureProxy
from meshgate.session.pending_calls import PendingAck
from meshgate.shapes.shape import Shape
from meshgate.suggestions import did_you_mean, names_text
from meshgate_wire.messages import EndpointSignature, Initialized, Parameter, SpawnActors

R = TypeVar("R")
MAX_TEXT = 256  # characters of a default or an annotation


class ActorMeshProxy(MeshProxy):
    """Actors of one class, one in each process. Endpoints of the class are attributes: ``actors.step.call(1)``."""

    _kind = "actors"

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)  # for annotations: ActorMesh[Trainer]

    def __init__(self, owned: OwnedObject, shape: Shape, actor: ActorClass, procs: MeshProxy | None) -> None:
        super().__init__(owned, shape)
        self.__name__ = actor.Class.__name__
        self._actor = actor
        self._procs = procs  # keeps the processes from being released

    @property
    def _class(self) -> type:
        return self._actor.Class

    def __getattr__(self, attr: str) -> Any:
        # Called once for each endpoint: its proxy becomes an ordinary attribute.
        actor: ActorClass | None = self.__dict__.get("_actor")
        if actor is None or attr.startswith("__"):
            raise AttributeError(attr)
        spec = actor.endpoints.get(attr)
        if spec is not None:
            endpoint: EndpointProxy[..., Any] = EndpointProxy(self, spec, actor.Class)
            self.__dict__[attr] = endpoint
            return endpoint
        if any(attr in vars(base) and not is_endpoint(vars(base)[attr]) for base in actor.Class.__mro__):
            return _NotAnEndpoint(self, attr)
        if attr.startswith("_"):  # libraries ask for such names, and expect a quick answer
            raise AttributeError(attr)
        # With obj=self, Python would append its own suggestion.
        raise AttributeError(f"{actor.name} has no endpoint {attr!r}{self._hint(attr)}", name=attr)

    def _hint(self, attr: str) -> str:
        """Why the class has no endpoint ``attr``, or what to write instead."""
        Class, endpoints = self._actor.Class, self._actor.endpoints
        if hasattr(current_class(Class), attr):
            return ". The class was defined again since this mesh was spawned: spawn a mesh of the new one"
        if (hint := restart_hint(Class)) and source_defines(Class, attr):
            return hint
        meant = did_you_mean(attr, endpoints) or did_you_mean(attr, dir(type(self)))
        if not endpoints:
            return meant or ", because no method of the class has the decorator @endpoint"
        listed = f"{meant or '.'} Its endpoints: {names_text(endpoints)}"
        return listed if meant else f"{listed}. What else an actor has stays in its process: let an endpoint return it"

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._actor.endpoints]

    def put(self, value: R) -> KeptMesh[R]:
        """Sends ``value`` to stay in each actor's process, as ``put`` of their processes does."""
        return put_value(self, value)

    def stop(self, reason: str = "stopped by client") -> FutureProxy[None]:
        """Stops the actors. Stopping them again does nothing; stopping a slice fails, as in Monarch."""
        if not self._can_stop:
            message = "Cannot call stop on an ActorMeshRef, requires an owned ActorMesh"
            return FutureProxy.failed(NotImplementedError(message))
        require_string(reason, "the reason")
        return self._request_stop("stop", reason, mark=reason)

    @property
    def initialized(self) -> FutureProxy[None]:
        """Settles when the actors are initialized."""
        ack = PendingAck(self._object, f"{self._name}.initialized")
        self._client.request(ack, lambda call: Initialized(call=call, target=self._ref), stream=self._stream)
        return ack.future

    def _host_name(self, rank: int) -> str:
        return self._procs._host_name(rank) if self._procs is not None else ""

    def _html_facts(self) -> dict[str, str]:
        return {"class": self._actor.name, "endpoints": ", ".join(self._actor.endpoints)}

    def _parts(self) -> tuple[Any, ...]:
        return self._actor, self._procs

    def _with_shape(self, shape: Shape) -> ActorMeshProxy:
        return ActorMeshProxy(self._owned, shape, self._actor, self._procs)

    def __repr__(self) -> str:
        return f"ActorMesh(class={self._class}, shape={self._shape})"


class _NotAnEndpoint(SeenAsMonarchs):
    """A method of an actor class that is not an endpoint; ``as_endpoint``, also Monarch's, makes it callable."""

    _monarch_module = "monarch._src.actor.endpoint"
    _monarch_name = "NotAnEndpoint"

    def __init__(self, mesh: ActorMeshProxy, name: str) -> None:
        self._mesh = mesh
        self._name = name

    if not TYPE_CHECKING:  # which would accept any attribute

        def __getattr__(self, attr):
            if attr.startswith("_"):
                raise AttributeError(attr)
            raise AttributeError(f"{self._description}: {self._remedy}", name=attr)

    @property
    def _is_method(self) -> bool:
        return inspect.isroutine(inspect.getattr_static(self._mesh._class, self._name))

    @property
    def _description(self) -> str:
        what = "a method" if self._is_method else "an attribute"
        return f"{self._name} is {what} of the class {self._mesh.__name__}, not an endpoint"

    @property
    def _remedy(self) -> str:
        if self._is_method:
            return f"add the decorator @endpoint to it, or call it with as_endpoint(actors.{self._name}).call(...)"
        return f"read it as {self._mesh.__name__}.{self._name}. To get that of an actor, let an endpoint return it"

    def __repr__(self) -> str:
        return f"<{self._description}>"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"Actor {self._mesh._class}.{self._name} is not annotated as an endpoint. To call it as one, add a "
            "@endpoint decorator to it, or directly wrap it in one as_endpoint(obj.method).call(...)"
        )

    @property
    def _ref(self) -> _MonarchsView:
        return _MonarchsView(self)

    def __as_endpoint__(self, *, explicit_response_port: bool = False) -> EndpointProxy[..., Any]:
        method = getattr(self._mesh._class, self._name)
        spec = EndpointSpec(
            name=self._name,
            signature=inspect.signature(method),
            explicit_response_port=explicit_response_port,
            is_async=inspect.iscoroutinefunction(method),
            placeholders=2 if explicit_response_port else 1,
        )
        return EndpointProxy(self._mesh, spec, self._mesh._class)


class _MonarchsView:
    """What ``as_endpoint`` of ``monarch.actor`` asks of a mesh in order to make an endpoint of a method."""

    def __init__(self, method: _NotAnEndpoint) -> None:
        self._method = method

    def _endpoint(self, kind: Any, method: Any, propagate: Any) -> EndpointProxy[..., Any]:
        return self._method.__as_endpoint__(explicit_response_port="ExplicitPort" in type(kind).__name__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method._mesh._class, name)


class _Text:
    """Stands for a default or an annotation that this process has as text only."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def signatures_of(actor: ActorClass) -> tuple[EndpointSignature, ...]:
    """The endpoints of ``actor``, for the message that spawns it."""
    return tuple(_signature(spec) for spec in actor.endpoints.values())


def _signature(spec: EndpointSpec) -> EndpointSignature:
    parameters = [
        Parameter(
            name=parameter.name[:MAX_TEXT],
            kind=int(parameter.kind),
            default=_text(parameter.default),
            annotation=_text(parameter.annotation),
        )
        for parameter in spec.signature.parameters.values()
    ]
    return EndpointSignature(
        name=spec.name,
        parameters=tuple(parameters),
        explicit_port=spec.explicit_response_port,
        is_async=spec.is_async,
        placeholders=spec.placeholders,
    )


def _text(value: Any) -> str | None:
    if value is inspect.Parameter.empty:
        return None
    if isinstance(value, str):
        text = value
    elif isinstance(value, type):
        text = value.__qualname__
    else:
        try:
            text = repr(value)
        except Exception:  # noqa: BLE001 - of a user's class; the signature is worth more than its text
            text = f"<{type(value).__name__}>"
    return text[:MAX_TEXT].encode(errors="replace").decode()


def actor_class_from(header: SpawnActors) -> ActorClass:
    """The actor class that ``header`` spawned. Its endpoints are those that it had then."""
    endpoints = {signature.name: _spec(signature) for signature in header.endpoints}
    return ActorClass(_class(header.class_name), header.class_name, header.kind, endpoints)


def _spec(signature: EndpointSignature) -> EndpointSpec:
    return EndpointSpec(
        name=signature.name,
        signature=inspect.Signature(_parameters(signature.parameters)),
        explicit_response_port=signature.explicit_port,
        is_async=signature.is_async,
        placeholders=signature.placeholders,
    )


def _parameters(parameters: Sequence[Parameter]) -> list[inspect.Parameter]:
    empty = inspect.Parameter.empty
    return [
        inspect.Parameter(
            parameter.name,
            inspect._ParameterKind(parameter.kind),
            default=empty if parameter.default is None else _Text(parameter.default),
            annotation=empty if parameter.annotation is None else parameter.annotation,
        )
        for parameter in parameters
    ]


def _class(name: str) -> type:
    """The class of this name if this process has imported it, otherwise a stand-in. Imports nothing."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:length]))
        for part in parts[length:]:
            found = getattr(found, part, None)
        if isinstance(found, type):
            return found
    return type(parts[-1], (standins.Actor,), {"__module__": ".".join(parts[:-1])})


_cache: weakref.WeakKeyDictionary[type, ActorClass] = weakref.WeakKeyDictionary()


def actor_class_of(Class: type) -> ActorClass:
    """``endpoints_of(Class)``, cached. Raises ``ValueError`` for a class that cannot be spawned."""
    actor = _cache.get(Class) if isinstance(Class, type) else None
    if actor is None:
        actor = endpoints_of(Class)
        _cache[Class] = actor
    return actor


def actor_class_to_spawn(Class: type) -> tuple[ActorClass, bool]:
    """The class, in its newest version if its module was reloaded here, and whether it travels as code.

    Warns if the class travels as code and its script was saved since it was started. Raises ``ValueError``.
    """
    actor = actor_class_of(Class)
    if not pickled_by_value(Class):
        return actor_class_of(current_class(Class)), False
    script = changed_script(Class)
    if script is not None:
        warn_caller(
            f"{script} was saved since this program started, and {actor.name} is spawned as it was then: classes of "
            "the main script are sent with the spawn, not synced. Restart the program, or move the class to a module",
            StaleCodeWarning,
        )
    return actor, True


def check_init(actor: ActorClass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises ``TypeError`` if the arguments do not fit the constructor."""
    try:
        actor.check_init(args, kwargs)
    except TypeError as error:
        raise TypeError(f"{error}{restart_hint(actor.Class)}") from None


def parameters_of(Class: type) -> tuple[str, ...]:
    """The names of the constructor's parameters."""
    return tuple(inspect.signature(Class).parameters)
