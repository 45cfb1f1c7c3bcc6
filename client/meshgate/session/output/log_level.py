"""The level of the root logger in the processes of a mesh."""

from __future__ import annotations

import logging

from meshgate.serialization.sent_as_source import Actor, SentAsSource, endpoint


class LogLevel(Actor, metaclass=SentAsSource):
    """Sets the level of its process. It needs nothing but torchmonarch."""

    @endpoint
    def set(self, level: int) -> None:
        logging.getLogger().setLevel(level)
