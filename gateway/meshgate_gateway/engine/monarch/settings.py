"""Monarch's settings in this process, and which of them hosts get."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping
from importlib.metadata import version
from typing import Any

PLAIN = (bool, int, float, str, type(None))

# Attaching passes the settings of this process on to the hosts, which serve other sessions as well. With a short
# delivery timeout a host ends what others run there, and with a short frame limit it refuses their messages.
NOT_FOR_HOSTS = frozenset({"codec_max_frame_length", "message_delivery_timeout"})


class FrameTooLarge(RuntimeError):
    """A message is longer than ``codec_max_frame_length``."""


class MonarchSettings:
    """The settings that the session's client has changed. Those that are not for hosts apply while none is attached."""

    def __init__(self) -> None:
        self._configured: dict[str, Any] = {}
        self.limits_frames = False  # whether ``check_frame`` may raise: calls ask no further otherwise
        self._own: dict[str, Any] = {}  # the values, without the client, of what was ever configured
        self._attaching: set[asyncio.Future[Any]] = set()

    async def configure(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """As ``Monarch.configure``."""
        if NOT_FOR_HOSTS & (settings.keys() | self._configured.keys()):
            while self._attaching:
                await asyncio.wait(self._attaching)
        present = _present()
        if unknown := sorted(settings.keys() - present.keys()):
            raise ValueError(f"Monarch {version('torchmonarch')} has no setting {', '.join(unknown)}")
        for name in settings:
            self._own.setdefault(name, present[name])
        dropped = {name: self._own[name] for name in self._configured.keys() - settings.keys()}
        try:
            _configure({**dropped, **settings})
        except BaseException:
            _configure({name: present[name] for name in dropped.keys() | settings.keys()})
            raise
        self._configured = dict(settings)
        self.limits_frames = "codec_max_frame_length" in self._configured
        return {name: value if isinstance(value, PLAIN) else str(value) for name, value in _present().items()}

    def withhold(self) -> None:
        """Call this before hosts are attached to, and then ``attaching``."""
        _configure({name: self._own[name] for name in self._not_for_hosts()})

    def attaching(self, attached: Awaitable[object]) -> None:
        """Applies what is withheld once ``attached`` has ended, however it does."""
        task = asyncio.ensure_future(attached)
        self._attaching.add(task)
        task.add_done_callback(self._attached)

    def _attached(self, task: asyncio.Future[object]) -> None:
        self._attaching.discard(task)
        if not task.cancelled():
            task.exception()  # what uses the hosts reports it
        if not self._attaching:
            _configure({name: self._configured[name] for name in self._not_for_hosts()})

    async def wait_applied(self) -> None:
        """Waits while something is withheld."""
        while self._attaching and self._not_for_hosts():
            await asyncio.wait(self._attaching)

    def _not_for_hosts(self) -> Iterable[str]:
        return NOT_FOR_HOSTS & self._configured.keys()

    def check_frame(self, size: int) -> None:
        """Raises FrameTooLarge above a limit that the client has set, as Monarch words it.

        Monarch applies its own limit to connections that are opened later, and this process has one to each host.
        """
        limit = self._configured.get("codec_max_frame_length")
        if limit is not None and size > limit:
            raise FrameTooLarge(
                f"rejecting oversize frame: len={size} > max={limit}. increase CODEC_MAX_FRAME_LENGTH to allow."
            )


def _present() -> dict[str, Any]:
    from monarch import config  # noqa: PLC0415 - loaded once Monarch is

    present: dict[str, Any] = config.get_global_config()
    return present


def _configure(settings: Mapping[str, Any]) -> None:
    from monarch import config  # noqa: PLC0415

    if settings:
        config.configure(**settings)
