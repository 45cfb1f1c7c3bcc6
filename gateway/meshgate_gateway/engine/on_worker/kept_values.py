"""The values that stay in a worker process: results of ``keep()``, and of ``put()``. Delivered by value.

The first actor of the engine's own that serves kept values (``code_actors.KeptValuesActor``) makes this process's
``KeptStore``, and puts it into the module ``MODULE``, by which the pickled arguments of calls reach it: code that is
delivered by value has no module to keep something in.

- ``keep`` is in the arguments of a call whose results stay. It takes effect while they are unpickled: the call's port
  then takes a description in place of the result.
- ``take`` is in the place of a kept value in the arguments of a call. The value has been delivered before, by the actor
  mentioned above, from the process that keeps it: the actor that is called does not wait, and its event loop is free.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Sequence
from itertools import islice
from types import ModuleType
from typing import Any

from meshgate_gateway.engine.on_worker.kept_references import MODULE  # by value too
from meshgate_gateway.engine.on_worker.large_messages import pickled
from meshgate_processes.control_groups import memory_limit  # by value too

MAX_LATE = 4096  # objects that were dropped before their value was kept
HOLDERS_NAMED = 8
FRAMES = 16
SAMPLE = 32  # items of a container whose size is looked at
DEPTH = 5  # of containers
LIMIT_VARIABLE = "MESHGATE_KEPT_MEMORY"


class Kept:
    """A value that stays. ``label`` is the call that it is the result of, for people; ``on_host`` are those of its
    ``nbytes`` that are in the memory of the host."""

    def __init__(self, value: Any, label: str, nbytes: int, on_host: int) -> None:
        self.value, self.label, self.nbytes, self.on_host = value, label, nbytes, on_host


class KeptStore:
    """The kept values of one process. ``limit``: the bytes that they may have together in the memory of the host; None:
    any number. Thread-safe.

    A value is named by the number of its object in the session and by its position in the call that returned it.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, int], Kept] = {}
        self._late: deque[int] = deque(maxlen=MAX_LATE)
        self._keeping: dict[int, tuple[Any, int, int, str]] = {}  # by the id of the port that the result is sent to
        self._delivered: dict[int, tuple[int, dict[int, Any]]] = {}  # the target, and what was not taken, by argument

    # --- results that stay

    def keep(self, arguments: Any, number: int, label: str) -> Any:
        """Returns ``arguments``, which are being unpickled, and makes the result of their call stay as ``number``."""
        from monarch.actor import context  # noqa: PLC0415 - resolved on the worker

        port = port_of_call(sys._getframe(1))
        with self._lock:
            # With the port itself, so that its id is not another's as long as the entry exists.
            self._keeping[id(port)] = (port, number, context().message_rank.rank, label)
        return arguments

    def result(self, port: Any, value: Any) -> Any:
        """What to send to ``port`` in place of ``value``: a description, if it is the result of a call that keeps it.

        Raises MemoryError if there is no room for it.
        """
        if not self._keeping:
            return value
        with self._lock:
            _, number, position, label = self._keeping.pop(id(port), (None, 0, 0, ""))
        return self.add(number, position, label, value) if number else value

    def failed(self, port: Any) -> None:
        """``port`` gets an exception."""
        if self._keeping:
            with self._lock:
                self._keeping.pop(id(port), None)

    def add(self, number: int, position: int, label: str, value: Any) -> dict[str, Any]:
        """Keeps ``value`` and returns its description. Raises MemoryError if there is no room for it."""
        description, on_host = measure(value)
        with self._lock:
            if number in self._late:
                return description  # nothing refers to it any more
            used = sum(each.on_host for each in self._kept.values())
            if self._limit is not None and used + on_host > self._limit:
                raise MemoryError(self._refusal(on_host, used))
            self._kept[number, position] = Kept(value, label, description["nbytes"], on_host)
        return description

    def _refusal(self, nbytes: int, used: int) -> str:
        by_label: dict[str, int] = {}
        for each in self._kept.values():
            by_label[each.label] = by_label.get(each.label, 0) + each.on_host
        largest = sorted(by_label.items(), key=lambda item: item[1], reverse=True)
        holders = ", ".join(f"{label} {megabytes(size)}" for label, size in largest[:HOLDERS_NAMED])
        more = f", and {len(largest) - HOLDERS_NAMED} others" if len(largest) > HOLDERS_NAMED else ""
        return (
            f"the result has {megabytes(nbytes)}, but this process already keeps {megabytes(used)} of the "
            f"{megabytes(self._limit or 0)} that kept values may have here ({holders or 'nothing'}{more}). Release "
            f"what is no longer used with .release(), or set {LIMIT_VARIABLE}, in bytes, in the environment of the "
            "workers"
        )

    def find(self, number: int, position: int) -> Kept | None:
        """The value, if this process keeps it."""
        return self._kept.get((number, position))

    def drop(self, numbers: Sequence[int], late: bool) -> None:
        """Forgets these objects. ``late``: values that are kept for them afterwards are forgotten at once."""
        dropped = set(numbers)
        with self._lock:
            for key in [key for key in self._kept if key[0] in dropped]:
                del self._kept[key]
            if late:
                self._late.extend(numbers)

    def make_room(self, arguments: Any, numbers: Sequence[int]) -> Any:
        """Returns ``arguments``, which are being unpickled, and forgets these objects before something is kept."""
        self.drop(numbers, late=False)
        return arguments

    def statistics(self) -> dict[str, int]:
        """How many values and deliveries there are, and the bytes of the values."""
        with self._lock:
            nbytes = sum(each.nbytes for each in self._kept.values())
            return {"values": len(self._kept), "nbytes": nbytes, "deliveries": len(self._delivered)}

    # --- arguments

    def expect(self, delivery: int, target: int) -> None:
        """The values for a call of the actors ``target`` are about to come, and then the call."""
        with self._lock:
            self._delivered[delivery] = (target, {})

    def deliver(self, delivery: int, values: dict[int, Any]) -> None:
        """The values, by argument. They are dropped if the delivery was forgotten meanwhile."""
        with self._lock:
            if delivery in self._delivered:
                self._delivered[delivery][1].update(values)

    def take(self, delivery: int, argument: int) -> Any:
        """A value that was delivered, which is forgotten here. Each can be taken once."""
        with self._lock:
            _, values = self._delivered[delivery]
            value = values.pop(argument)
            if not values:
                del self._delivered[delivery]
        return value

    def forget(self, delivery: int) -> None:
        """The call is not going to arrive, or has raised: whatever it has not taken is dropped."""
        with self._lock:
            self._delivered.pop(delivery, None)

    def forget_calls_of(self, targets: Sequence[int]) -> None:
        """The actor of this process in the meshes ``targets`` has ended: no call of it is going to arrive."""
        with self._lock:
            for delivery in [each for each, (target, _) in self._delivered.items() if target in targets]:
                del self._delivered[delivery]


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"


def describe(value: Any) -> dict[str, Any]:
    """The type, the approximate size in memory and, of an array or a tensor, dtype and shape."""
    return measure(value)[0]


def measure(value: Any) -> tuple[dict[str, Any], int]:
    """The description of ``value``, and how much of its size is in the memory of the host."""
    kind, on_host = type(value), 0
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    description: dict[str, Any] = {"type": name, "nbytes": 0, "dtype": "", "shape": None}
    try:
        description["nbytes"], on_host = size_of(value, DEPTH)
        if isinstance(shape := getattr(value, "shape", None), tuple):
            description["shape"] = tuple(int(size) for size in shape)
            description["dtype"] = str(getattr(value, "dtype", ""))
    except Exception:  # noqa: BLE001 - user code, and the value is kept all the same
        description["shape"] = None
    return description, on_host


def size_of(value: Any, depth: int) -> tuple[int, int]:
    """Roughly the bytes that ``value`` takes, and those of them in the memory of the host, where tensors of a GPU have
    none. Of large containers, some items stand for all."""
    nbytes = getattr(value, "nbytes", None)
    if isinstance(nbytes, int):  # of an array or a tensor
        device = getattr(getattr(value, "device", None), "type", "cpu")  # torch's; numpy's is a text
        return nbytes, nbytes if device == "cpu" else 0
    own = sys.getsizeof(value)
    if isinstance(value, (str, bytes, bytearray)) or not depth:
        return own, own
    content: Any = getattr(value, "__dict__", {}).values()
    if isinstance(value, dict):
        content = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        content = value
    sampled = [size_of(item, depth - 1) for item in islice(content, SAMPLE)]
    if not sampled:
        return own, own
    inside, on_host = (sum(sizes) * len(content) // len(sampled) for sizes in zip(*sampled, strict=True))
    return own + inside, own + on_host


def require_frame(value: Any, nbytes: int, limit: int) -> None:
    """Raises RuntimeError if ``value``, of about ``nbytes``, does not fit into one of Monarch's messages, with which
    Monarch would lose the connection between two processes. Only a pickle that may be too large is measured, because
    that copies it."""
    if nbytes < limit:
        return
    exact = isinstance(getattr(value, "nbytes", None), int)  # an array's or a tensor's pickle is as large
    size = nbytes if exact else len(pickled(value).buffer())
    if size >= limit:
        raise RuntimeError(
            f"the value has {megabytes(size)}, but a message from process to process must be smaller than Monarch's "
            f"codec_max_frame_length, {megabytes(limit)}: keep the value in parts, or spawn the processes while "
            "meshgate.config.configure(codec_max_frame_length=...) allows more"
        )


def frame_limit() -> int:
    """The bytes that a message of this process may have."""
    from monarch.config import get_global_config  # noqa: PLC0415 - resolved on the worker

    limit: int = get_global_config()["codec_max_frame_length"]
    return limit


def port_of_call(frame: Any) -> Any:
    """The port for the result of the call whose arguments are unpickled in ``frame``: Monarch's code that does so has
    it, and nothing else."""
    for _ in range(FRAMES):
        if frame is None:
            break
        if "response_port" in frame.f_locals:
            return frame.f_locals["response_port"]
        frame = frame.f_back
    raise RuntimeError("this release of torchmonarch does not show where a result goes, so keep() cannot work with it")


def kept_limit(processes: int) -> int:
    """The bytes of kept values that a process may have: what ``MESHGATE_KEPT_MEMORY`` says, or its part of half of the
    memory of the machine or its control groups, which ``processes`` share."""
    if given := os.environ.get(LIMIT_VARIABLE):
        return int(given)
    return memory_limit() // 2 // max(processes, 1)


def process_store(processes: int, actor_class: type) -> KeptStore:
    """This process's store, made by the first call. Other processes name ``actor_class``, which serves it, by
    ``MODULE``."""
    module: Any = sys.modules.setdefault(MODULE, ModuleType(MODULE))
    if not hasattr(module, "store"):
        module.KeptValuesActor = actor_class
        store = KeptStore(kept_limit(processes))
        keep_results(store)
        module.store = store  # last, so that a failure is not taken for a store
    found: KeptStore = module.store
    return found


def keep_results(store: KeptStore) -> None:
    """From now on, a result that stays is described to its caller. A result goes through one of three methods."""
    from monarch._src.actor import actor_mesh  # noqa: PLC0415 - resolved on the worker

    Port: Any = actor_mesh.Port
    pending_result_now, send_now, exception_now = Port._pending_result, Port.send, Port.exception

    def pending_result(self: Any, value: Any) -> Any:
        return pending_result_now(self, store.result(self, value))

    def send(self: Any, obj: Any) -> None:
        send_now(self, store.result(self, obj))

    def exception(self: Any, obj: Exception) -> None:
        store.failed(self)
        exception_now(self, obj)

    send.__doc__, exception.__doc__ = send_now.__doc__, exception_now.__doc__
    Port._pending_result, Port.send, Port.exception = pending_result, send, exception
