"""Pickles of the client, forwarded to workers without being opened.

An object whose ``__reduce__`` is ``(pickle.loads, (data,))`` unpickles as the value that ``data`` holds. So an actor
class or an argument reaches a worker although this process could not import what it refers to.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshgate_gateway.engine.monarch.interface import Fragments
from meshgate_gateway.engine.on_worker import process as on_worker
from meshgate_gateway.engine.on_worker import tracing


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

    __slots__ = ("_fragments",)

    def __init__(self, fragments: Fragments) -> None:
        self._fragments = fragments

    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray().join, (list(self._fragments),)


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
        payload: Forward | ForwardAt,
        trace: Mapping[str, str],
        span_functions: Sequence[str],
        context_variable: str,
    ) -> None:
        self.size = payload.size
        self._arguments = (payload, dict(trace), tuple(span_functions), context_variable)

    def __reduce__(self) -> tuple[Any, ...]:
        return tracing.with_trace, self._arguments
