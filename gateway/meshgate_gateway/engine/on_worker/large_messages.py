"""Asks the engine before a large message is sent to it, so that what its memory cannot hold stays here. By value.

A result that exceeds what is left of the engine's memory would end it, and with it every mesh of the session. So the
reply becomes an exception of its rank, before a byte of it has left. What actors send to each other does not pass the
engine and is not asked about.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

LARGE = 8 * 2**20  # bytes; to ask takes about 1 ms, a call with a result of this size 12 ms


def ask_before_large_messages(
    connect: Callable[[], Any], hello: Mapping[str, Any], root: str
) -> Callable[[Any, Any], None]:
    """From now on this process asks before it sends a large reply to a call of the engine's.

    ``connect()`` connects to the engine, and ``root`` is the actor id of its ports. Returns what asks before ``value``
    is sent to ``port``. Both raise MemoryError if the engine refuses.
    """
    from monarch._src.actor import actor_mesh  # noqa: PLC0415 - resolved on the worker

    def pickled(value: Any) -> Any:
        return actor_mesh.pickle(value, allow_tensor_engine_references=False, allow_mesh_references=True)

    def pending_result(self: Any, result: Any) -> Any:  # as Monarch's own, which does not show the size
        state = pickled(result)
        nbytes = len(state.buffer())
        if nbytes >= LARGE and answers_the_engine(sys._getframe(1)):
            ask(connect, hello, nbytes, reply=True)
        return actor_mesh.PendingMessage(actor_mesh.PythonMessageKind.Result(self._rank), state)

    def before_send(port: Any, value: Any) -> None:
        target = port._port_ref
        if type(target).__name__ != "PortRef" or str(target.port_id.actor_id) != root:
            return  # Monarch panics if the id of a OncePortRef is read after its use, and the engine has none of these
        nbytes = len(pickled(value).buffer())
        if nbytes >= LARGE:
            ask(connect, hello, nbytes, reply=False)

    actor_mesh.Port._pending_result = pending_result
    return before_send


def answers_the_engine(frame: Any) -> bool:
    """Whether the code that runs in ``frame`` replies to a call of the engine's.

    The port does not show it: on its way down a tree of processes, a call gets ports of the processes above. But
    Monarch gives calls a correlation id, and the engine, which makes its messages itself, does not. Only the method of
    Monarch's that handles a message has it, as a local variable, so that calls with small results cost nothing.
    """
    for _ in range(4):
        if frame is None:
            break
        if "correlation_id" in frame.f_locals:
            return frame.f_locals["correlation_id"] is None
        frame = frame.f_back
    return False


def ask(connect: Callable[[], Any], hello: Mapping[str, Any], nbytes: int, *, reply: bool) -> None:
    """Waits for the engine's answer. Raises MemoryError with the reason if it refuses the message."""
    with connect() as connection:
        request = {**hello, "stream": "large", "nbytes": nbytes, "reply": reply}
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile("rb") as file:
            answer = file.read()
    if not answer:
        raise RuntimeError("the session has ended while this process asked for room for a large message")
    if answer != b"+":
        raise MemoryError(answer[1:].decode())
