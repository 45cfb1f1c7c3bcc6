"""Reads the replies that arrive at a port of the engine's own, without opening their pickles.

Monarch's ``PythonMessage.decode`` unpickles with ``cloudpickle.cloudpickle.loads``, looked up at each call.
``undecoded`` makes that function return the bytes, on this thread and during one decode.
"""

from __future__ import annotations

import pickle
import threading
from typing import Any

import cloudpickle
import cloudpickle.cloudpickle

COPY_LIMIT = 16 * 1024  # bytes; copying a smaller reply costs less than a view of it

_decoding = threading.local()
_real_loads = cloudpickle.loads


def replace_loads() -> None:
    """Call it before Monarch is imported."""
    cloudpickle.loads = cloudpickle.cloudpickle.loads = _loads_or_bytes


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
    if count == 0:
        return _as_bytes(data), ()
    from monarch._rust_bindings.monarch_hyperactor.pickle import pop_mesh_reference  # noqa: PLC0415

    return _as_bytes(data), tuple(pop_mesh_reference() for _ in range(count))


def _as_bytes(data: Any) -> bytes | memoryview:
    """The bytes of ``data``, a buffer of Monarch's.

    The ``format`` of its views is a dangling pointer: ``memoryview.format`` and ``cast`` crash the process. A
    ``PickleBuffer`` does not read it.
    """
    return bytes(data) if len(data) <= COPY_LIMIT else pickle.PickleBuffer(data).raw()
