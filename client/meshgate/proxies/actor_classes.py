"""Actor classes to spawn: their endpoints, and whether they travel by name or as code."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

from meshgate.actors.actor_class import ActorClass, endpoints_of
from meshgate.caller import warn_caller
from meshgate.errors import StaleCodeWarning
from meshgate.serialization.pickling import pickled_by_value
from meshgate.serialization.stale_source import changed_script, current_class, restart_hint

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
