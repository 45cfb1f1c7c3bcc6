"""Monarch's settings that the program changes (``meshgate.config``)."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from meshgate_gateway.engine.interfaces import Handler, Send
from meshgate_wire import Fragments
from meshgate_wire.messages import ConfigureMonarch, Values


class Configurable(Protocol):
    async def configure(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """As ``Monarch.configure``."""


class MonarchSettings:
    def __init__(self, monarch: Configurable, send: Send) -> None:
        self._monarch, self._send = monarch, send

    def handlers(self) -> Mapping[type, Handler]:
        return {ConfigureMonarch: self._configure}

    async def _configure(self, header: ConfigureMonarch, buffers: Sequence[Fragments]) -> None:
        in_effect = await self._monarch.configure(header.settings)
        self._send(Values(call=header.call), [pickle.dumps(in_effect)])
