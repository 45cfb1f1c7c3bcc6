"""The endpoints of an actor class as data: a later holder of the session builds proxies from it without the class."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any

from meshgate.actors import standins
from meshgate.actors.actor_class import ActorClass, EndpointSpec
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
