"""Pickles that pass through the engine unopened: those of the client to workers, and the replies of workers.

An object whose ``__reduce__`` is ``(pickle.loads, (data,))`` unpickles as the value that ``data`` holds. So an actor
class or an argument reaches a worker although this process could not import what it refers to.

Monarch's ``PythonMessage.decode`` unpickles with ``cloudpickle.cloudpickle.loads``, looked up at each call.
``undecoded`` makes that function return the bytes, on this thread and during one decode.
"""

from __future__ import annotations

import io
import operator
import pickle
import pkgutil
import threading
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import cloudpickle.cloudpickle

from meshgate_gateway.engine.monarch.interface import Fragments
from meshgate_gateway.engine.on_worker import process as on_worker
from meshgate_gateway.engine.on_worker import running_calls, tracing

COPY_LIMIT = 16 * 1024  # bytes; copying a smaller reply costs less than a view of it
LARGE = 64 * 1024  # bytes of a payload; below, two copies cost less than what ``Large`` adds

# What is written before the pickle of a call's arguments, around the call's number in eight bytes. A pickle is a
# program for a stack machine (see ``pickletools``): this part calls ``RunningCalls.mark`` and drops the result. So what
# the client has sent need not be pickled again.
MARK = f"c{running_calls.MODULE}\nmark\n\x8a\x08".encode("latin-1"), b"\x85R0"

# Opcodes that are followed by a size in eight bytes and the content.
_BYTES, _BYTEARRAY = b"\x8e", b"\x96"

_decoding = threading.local()
_real_loads = cloudpickle.loads


# --- to workers ---------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Forward:
    """Unpickles as the value that a pickle of the client holds."""

    data: Fragments
    buffers: Sequence[Fragments] = ()
    objects: Sequence[Any] = ()

    @property
    def size(self) -> int:
        """The bytes of the pickle and its buffers."""
        return sum(len(fragment) for part in (self.data, *self.buffers) for fragment in part)

    def __reduce__(self) -> tuple[Any, ...]:
        data = self.data[0] if len(self.data) == 1 else _Joined(self.data)
        if not self.buffers and not self.objects:
            return pickle.loads, (data,)
        return on_worker.unpickle, (data, [_Joined(buffer) for buffer in self.buffers], list(self.objects))


class _Joined:
    """Unpickles as one bytearray of all fragments. Monarch reads each fragment without a copy here."""

    __slots__ = ("fragments",)

    def __init__(self, fragments: Fragments) -> None:
        self.fragments = fragments

    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray().join, (list(self.fragments),)


class Large:
    """Unpickles as ``payload``, each of whose buffers the worker reads into a bytearray with a single copy."""

    __slots__ = ("payload",)

    def __init__(self, payload: Any) -> None:
        self.payload = payload

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, ((self.payload,), 0)


class ForwardClass:
    """Unpickles as an actor class. If the worker cannot import it, the error lists where Python looked."""

    __slots__ = ("_data", "_name")

    def __init__(self, data: Fragments, name: str) -> None:
        self._data, self._name = data, name

    def __reduce__(self) -> tuple[Any, ...]:
        return on_worker.load_class, (b"".join(self._data), self._name)


class ForwardItem:
    """Unpickles as ``pair[index]`` of a forwarded pair, such as the ``args`` of ``(args, kwargs)``."""

    __slots__ = ("_index", "_pair")

    def __init__(self, pair: Forward, index: int) -> None:
        self._pair, self._index = pair, index

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, (self._pair, self._index)


class ForwardAt:
    """Unpickles as ``payload``, and makes ``rank`` of a mesh of these ``sizes`` the rank of the message it is in."""

    __slots__ = ("_arguments", "size")

    def __init__(
        self, payload: Forward, rank: int, labels: Sequence[str], sizes: Sequence[int], context_variable: str
    ) -> None:
        self.size = payload.size
        self._arguments = (payload, rank, tuple(labels), tuple(sizes), context_variable)

    def __reduce__(self) -> tuple[Any, ...]:
        return on_worker.at_rank, self._arguments


class ForwardWithTrace:
    """Unpickles as ``payload``, and makes the endpoint of its message run in a span."""

    __slots__ = ("_arguments", "size")

    def __init__(
        self,
        payload: Forward | ForwardAt | OnProcess,
        trace: Mapping[str, str],
        span_functions: Sequence[str],
        context_variable: str,
    ) -> None:
        self.size = payload.size
        self._arguments = (payload, dict(trace), tuple(span_functions), context_variable)

    def __reduce__(self) -> tuple[Any, ...]:
        return tracing.with_trace, self._arguments


class OnProcess:
    """Unpickles as the result of a method of an object that the process has in ``place`` (``module:name``)."""

    __slots__ = ("_arguments", "_method", "_place", "size")

    def __init__(self, place: str, method: str, *arguments: Any, size: int = 0) -> None:
        self._place, self._method, self._arguments, self.size = place, method, arguments, size

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.methodcaller(self._method, *self._arguments), (_InPlace(self._place),)


class _InPlace:
    __slots__ = ("_place",)

    def __init__(self, place: str) -> None:
        self._place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return pkgutil.resolve_name, (self._place,)


class _WithObjects(pickle.Pickler):
    """Pickles the objects in a list as their index there."""

    def __init__(self, file: io.BytesIO, objects: Sequence[Any]) -> None:
        super().__init__(file)
        self._indexes = {id(each): index for index, each in enumerate(objects)}

    def persistent_id(self, obj: Any) -> int | None:
        return self._indexes.get(id(obj))


def dumps_with_objects(value: Any, objects: Sequence[Any]) -> bytes:
    """A pickle of ``value`` for ``Forward``, with persistent ids in place of ``objects``."""
    file = io.BytesIO()
    _WithObjects(file, objects).dump(value)
    return file.getvalue()


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Takes the place of cloudpickle's, with which Monarch pickles messages.

    For a ``Large`` payload it writes the fragments of each buffer after an opcode and the size. Pickled as a list of
    fragments, which is all that cloudpickle's own can do, a worker would copy them twice: to read and to join them.
    """

    def __init__(self, file: Any, *args: Any, **options: Any) -> None:
        super().__init__(file, *args, **options)
        self._file = file

    def dump(self, obj: Any) -> Any:
        if type(obj) is not Large:
            return super().dump(obj)
        payload = io.BytesIO()
        buffers: list[_Joined] = []
        _WithoutBuffers(payload, buffers).dump(obj.payload)
        write = self._file.write
        write(cloudpickle.dumps(on_worker.unpickle, 3)[:-1])  # without frames and STOP: what follows calls it
        write(b"".join((_BYTES, payload.tell().to_bytes(8, "little"), payload.getvalue(), b"]](")))
        for buffer in buffers:
            write(_BYTEARRAY + sum(map(len, buffer.fragments)).to_bytes(8, "little"))
            for fragment in buffer.fragments:
                write(fragment)
        write(b"e\x87R.")
        return None


class _WithoutBuffers(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles buffers as persistent ids, and adds them to ``buffers``."""

    def __init__(self, file: io.BytesIO, buffers: list[_Joined]) -> None:
        super().__init__(file)
        self._buffers = buffers

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not _Joined:
            return None
        self._buffers.append(obj)
        return len(self._buffers) - 1


# --- from workers -------------------------------------------------------------------------------------------


def change_cloudpickle() -> None:
    """Replaces ``loads`` by one that can leave pickles unopened, and ``Pickler`` by one that writes a ``Large`` payload
    in pieces; pickles code with the name of its file. Call it before Monarch is imported."""
    cloudpickle.loads = cloudpickle.cloudpickle.loads = _loads_or_bytes
    cloudpickle.Pickler = cloudpickle.cloudpickle.Pickler = Pickler
    cloudpickle.Pickler.dispatch_table[types.CodeType] = _reduce_code


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    """As cloudpickle does, but with the name of the file, which cloudpickle 3.1.3 replaces by ``<dynamic-code>``. By
    that name, ``meshgate stacks`` leaves out the frames of meshgate."""
    make, arguments = cloudpickle.cloudpickle._code_reduce(code)
    return make, (*arguments[:10], code.co_filename, *arguments[11:])


def undecoded(message: Any) -> tuple[bytes | memoryview, tuple[Any, ...]]:
    """The pickle in a message, and the references to meshes that it refers to."""
    _decoding.references = len(message.refs)
    try:
        data, references = message.decode()
    finally:
        _decoding.references = None
    return data, references


def _loads_or_bytes(data: Any, /, *args: Any, **kwargs: Any) -> Any:
    """``cloudpickle.loads``, except during ``undecoded``: then the data, unopened, and its mesh references."""
    count = getattr(_decoding, "references", None)
    if count is None:
        return _real_loads(data, *args, **kwargs)
    # The ``format`` of a view of ``data``, a buffer of Monarch's, is a dangling pointer: ``memoryview.format`` and
    # ``cast`` crash the process. A ``PickleBuffer`` does not read it.
    unopened = bytes(data) if len(data) <= COPY_LIMIT else pickle.PickleBuffer(data).raw()
    if count == 0:
        return unopened, ()
    from monarch._rust_bindings.monarch_hyperactor.pickle import pop_mesh_reference  # noqa: PLC0415

    return unopened, tuple(pop_mesh_reference() for _ in range(count))
