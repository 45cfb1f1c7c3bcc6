"""The actor whose calls are measured."""

from __future__ import annotations

from meshgate.serialization.sent_as_source import Actor, SentAsSource, endpoint


class Echo(Actor, metaclass=SentAsSource):
    """It needs nothing but torchmonarch."""

    @endpoint
    def echo(self, data: bytes, answer: int) -> bytes:
        """``answer`` bytes."""
        return bytes(answer)
