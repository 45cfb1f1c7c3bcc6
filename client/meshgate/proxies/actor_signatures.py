"""The endpoints of an actor class as data: a later holder of the session builds proxies from it without the class."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Sequence
from typing import Any

from meshgate.actors import standins
from meshgate.actors.actor_class import ActorClass, EndpointSpec, endpoints_of
from meshgate.caller import warn_caller
from meshgate.errors import StaleCodeWarning
from meshgate.serialization.pickling import pickled_by_value
from meshgate.serialization.stale_source import changed_script, current_class, restart_hint
from meshgate_wire.messages import EndpointSignature, Parameter, SpawnActors

MAX_TEXT = 256  # characters of a default or an annotation


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
