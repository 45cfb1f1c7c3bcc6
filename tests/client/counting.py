"""The actor class of these tests. What its endpoints do is what the fake gateway is told."""

from __future__ import annotations

from typing import Any

from meshgate.actors import Actor, endpoint


class Counter(Actor):
    def __init__(self, start: int = 0) -> None:
        self.value = start

    @endpoint
    def add(self, amount: int, *, twice: bool = False) -> Any:
        """What the test says."""

    @endpoint
    def echo(self, value: Any) -> Any:
        """What the test says."""

    @endpoint(explicit_response_port=True)
    def ported(self, port: Any, value: Any) -> None:
        """What the test says."""

    def plain(self, value: int) -> int:
        return value
