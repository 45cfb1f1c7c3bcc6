"""Asks the engine before a large message is sent to it, so that what its memory cannot hold stays here. By value.

A result that exceeds what is left of the engine's memory would end it, and with it every mesh of the session. So the
reply becomes an exception of its rank, before a byte of it has left. What actors send to each other does not pass the
engine and is not asked about.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

FRAMES = 8
"""From Monarch's handler to the sender: ``running_calls``, the endpoint, two functions, ``kept_values`` and two of
``kept_references``."""
LARGE = 8 * 2**20  # bytes; to ask takes about 1 ms, a call with a result of this size 12 ms


def ask_before_large_messages(
    connect: Callable[[], Any], hello: Mapping[str, Any], root: str, rank_of: Callable[[Any, Any], int | None]
) -> Callable[..., bool]:
    """From now on this process asks before it sends a large reply to a call of the engine's.

    ``connect()`` connects to the engine, and ``root`` is the actor id of its ports. ``rank_of(port, frame)`` is the
    rank in a reply. Returns what sends ``value`` to ``port`` if this is a large message to the engine or its rank is
    not the port's, and returns whether it has; ``frame`` is that of the sender. Both raise MemoryError if the engine
    refuses the message.
    """
    from monarch._src.actor import actor_mesh  # noqa: PLC0415 - resolved on the worker

    result = actor_mesh.PythonMessageKind.Result
    last = measure_pickles()

    def measured(value: Any) -> tuple[Any, int | None]:
        """Monarch's pickle of ``value``, and its size; None: it was not measured."""
        last.nbytes = None
        state = actor_mesh.pickle(value, allow_tensor_engine_references=False, allow_mesh_references=True)
        return state, last.nbytes

    def size_of(state: Any, nbytes: int | None) -> int:
        # ``buffer()`` copies the pickle: a third of the time of 100 MB between two actors.
        return len(state.buffer()) if nbytes is None else nbytes

    def pending_result(self: Any, value: Any) -> Any:  # as Monarch's own, which does not show the size
        state, nbytes = measured(value)
        frame = sys._getframe(1)
        # Every result passes here: what is known to be small needs no search for the call that it answers.
        if (nbytes is None or nbytes >= LARGE) and answers_the_engine(frame) and (n := size_of(state, nbytes)) >= LARGE:
            ask(connect, hello, n, reply=True, kept=gives_a_kept_value(frame))
        return actor_mesh.PendingMessage(result(rank_of(self, frame)), state)

    def send(port: Any, value: Any, frame: Any, *, large: bool) -> bool:
        large = large and sends_to(port, root)
        rank = rank_of(port, frame)
        if not large and rank == port._rank:
            return False
        state, nbytes = measured(value)
        if large and (n := size_of(state, nbytes)) >= LARGE:
            ask(connect, hello, n, reply=False)
        return send_pickled(port, result(rank), state)

    actor_mesh.Port._pending_result = pending_result
    return send


def measure_pickles() -> Any:
    """From now on, ``nbytes`` of what this returns is the size of the last pickle that Monarch has made in this thread.

    Monarch looks cloudpickle's class up for each pickle, unless torch is loaded: then it uses a class of its own, which
    it derives from that class once.
    """
    import cloudpickle  # noqa: PLC0415 - resolved on the worker

    class Last(threading.local):
        nbytes: int | None = None

    class MeasuredPickler(cloudpickle.cloudpickle.Pickler):  # type: ignore[misc]
        _meshgate_file: Any = None  # in classes of users that do not call __init__

        def __init__(self, file: Any, *args: Any, **options: Any) -> None:
            super().__init__(file, *args, **options)
            self._meshgate_file = file

        def dump(self, obj: Any) -> Any:
            dumped = super().dump(obj)
            if type(self._meshgate_file).__module__.startswith("monarch."):
                last.nbytes = len(self._meshgate_file)
            return dumped

    # So that it is pickled by its name, also in a function or a class that programs send.
    MeasuredPickler.__module__, MeasuredPickler.__qualname__ = cloudpickle.cloudpickle.__name__, "Pickler"
    MeasuredPickler.__name__ = "Pickler"
    last = Last()
    cloudpickle.Pickler = cloudpickle.cloudpickle.Pickler = MeasuredPickler
    return last


def pickled(value: Any) -> Any:
    """Monarch's pickle of the content of a message."""
    from monarch._src.actor import actor_mesh  # noqa: PLC0415 - resolved on the worker

    return actor_mesh.pickle(value, allow_tensor_engine_references=False, allow_mesh_references=True)


def send_pickled(port: Any, kind: Any, state: Any) -> bool:
    """Sends a message that is pickled already, unless it names a mesh that is still coming up. Returns whether."""
    from monarch._src.actor import actor_mesh  # noqa: PLC0415 - resolved on the worker

    message = actor_mesh.PendingMessage(kind, state).try_resolve_now()
    if message is not None:
        port._send_message(message)
    return message is not None


def sends_to(port: Any, root: str) -> bool:
    """Whether ``port`` is one of the actor with the id ``root``. Monarch panics if the id of a OncePortRef is read
    after its use; those of the engine are for replies to its calls alone."""
    target = port._port_ref
    return type(target).__name__ == "PortRef" and str(target.port_id.actor_id) == root


def answers_the_engine(frame: Any) -> bool:
    """Whether the code that runs in ``frame`` replies to a call of the engine's.

    The port does not show it: on its way down a tree of processes, a call gets ports of the processes above. But
    Monarch gives calls a correlation id, and the engine, which makes its messages itself, does not.
    """
    call = call_in(frame)
    return call is not None and call["correlation_id"] is None


def gives_a_kept_value(frame: Any) -> bool:
    """Whether ``code_actors.KeptValuesActor`` handles the call in ``frame``. Only values make its replies large."""
    call = call_in(frame)
    actor = call.get("self") if call is not None else None
    return type(getattr(actor, "instance", None)).__name__ == "KeptValuesActor"


def call_in(frame: Any) -> Mapping[str, Any] | None:
    """The local variables of the method of Monarch's that handles the call in ``frame``; it alone knows that. So calls
    with small results, before which nothing was printed, cost nothing."""
    for _ in range(FRAMES):
        if frame is None:
            break
        variables: Mapping[str, Any] = frame.f_locals
        if "correlation_id" in variables:
            return variables
        frame = frame.f_back
    return None


def ask(connect: Callable[[], Any], hello: Mapping[str, Any], nbytes: int, *, reply: bool, kept: bool = False) -> None:
    """Waits for the engine's answer. Raises MemoryError with the reason if it refuses the message. ``kept``: the reply
    is a kept value that the client fetches."""
    with connect() as connection:
        request = {**hello, "stream": "large", "nbytes": nbytes, "reply": reply, "kept": kept}
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile("rb") as file:
            answer = file.read()
    if not answer:
        raise RuntimeError("the session has ended while this process asked for room for a large message")
    if answer != b"+":
        raise MemoryError(answer[1:].decode())
