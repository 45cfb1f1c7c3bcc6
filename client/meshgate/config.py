"""Monarch's settings, for the sessions of this program: the counterpart of ``monarch.config``.

    with meshgate.config.configured(stop_actor_timeout="1m"):
        procs = hosts.spawn_procs(...)

A setting applies to the engines of the program's open and later sessions, and to the processes that they spawn from
then on. Monarch defines the settings: ``get_global_config()`` returns those of the gateway's release.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from meshgate.actors.monarch_settings import Setting, check_settings, monarch_settings
from meshgate.actors.monarch_surface import missing_attribute
from meshgate.proxies.client import any_open, configure_open_clients, current_client

__all__ = ["clear_runtime_config", "configure", "configured", "get_global_config", "get_runtime_config"]


def configure(**settings: Any) -> None:
    """Changes settings of Monarch. Durations are strings such as ``"30s"``.

    Waits until the open sessions have applied them. Raises ``InvalidRequestError``, with the reason, and changes
    nothing if Monarch does not have a setting or rejects its value, or if a session cannot apply it. Without a session
    it asks this machine's Monarch, if there is one.
    """
    _replace({**monarch_settings.own, **check_settings(settings)})


def clear_runtime_config() -> None:
    """Returns all settings to the values that the engine has by itself."""
    _replace({})


def get_runtime_config() -> dict[str, Setting]:
    """The settings that this program has changed."""
    return monarch_settings.wanted()


def get_global_config() -> dict[str, Setting]:
    """All settings in effect in the engine of the current session.

    Without a session: those of this machine's Monarch, and what the program has changed. Raises ``GatewayError`` if
    there is neither.
    """
    if not any_open() and (local := monarch_settings.without_session()) is not None:
        return local
    return current_client().configure_monarch(monarch_settings.wanted()).get()


@contextlib.contextmanager
def configured(**overrides: Any) -> Iterator[dict[str, Setting]]:
    """Changes settings inside a ``with`` block. Yields ``get_global_config()`` or, if it cannot, what was changed."""
    before = dict(monarch_settings.own)
    configure(**overrides)
    try:
        known = any_open() or monarch_settings.without_session() is not None
        yield get_global_config() if known else get_runtime_config()
    finally:
        _replace(before)


def _replace(settings: Mapping[str, Setting]) -> None:
    before = monarch_settings.own
    monarch_settings.own = dict(settings)
    try:
        if not any_open():
            monarch_settings.without_session()  # raises if this machine's Monarch rejects a value
        configure_open_clients()
    except BaseException:
        monarch_settings.own = before
        raise


def __getattr__(name: str) -> Any:
    raise AttributeError(missing_attribute("config", name))
