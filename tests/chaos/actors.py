"""The actors of the workload."""

from __future__ import annotations

import os
import threading
from typing import Any

from meshgate import Actor, Port, endpoint


class Ledger(Actor):
    """Records every call that reaches it, in order."""

    def __init__(self) -> None:
        self._calls: dict[str, list[int]] = {}

    @endpoint
    def record(self, caller: str, number: int) -> int:
        self._calls.setdefault(caller, []).append(number)
        return number

    @endpoint
    def echo(self, number: int, data: bytes) -> tuple[int, bytes]:
        self._calls.setdefault("large", []).append(number)
        return number, data

    @endpoint
    def say(self, number: int) -> None:
        print(f"line {number}", flush=True)

    @endpoint
    def answer(self, port: Port[int], number: int) -> None:
        port.send(number)

    @endpoint
    def calls(self) -> dict[str, list[int]]:
        return self._calls

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def hang(self) -> Any:
        threading.Event().wait()
