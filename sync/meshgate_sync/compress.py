"""Compression on the way from the laptop to the gateway, where that helps: the one slow link of the journey.

Inside the cluster pieces travel as they are: links are faster there than any codec of the standard library, which is
all that a bare host has.
"""

from __future__ import annotations

import threading

import zstandard

from .errors import MalformedMessage

__all__ = ["squeeze", "unsqueeze"]

_LEVEL = 3
_WORTH = 0.95
_PLAIN = b"\0"
_ZSTD = b"\1"
_PROBE = 16 * 1024

_local = threading.local()


def squeeze(data: bytes) -> bytes:
    """``data`` with a byte before it that says how it is written."""
    if len(data) > 4 * _PROBE:
        middle = len(data) // 2
        probe = data[middle : middle + _PROBE]
        if len(_compressor().compress(probe)) > _WORTH * len(probe):
            return _PLAIN + data
    smaller = _compressor().compress(data)
    return _ZSTD + smaller if len(smaller) < _WORTH * len(data) else _PLAIN + data


def unsqueeze(data: bytes, size: int) -> bytes:
    """The ``size`` bytes that were squeezed. Raises MalformedMessage, before more than that is allocated."""
    kind, body = data[:1], data[1:]
    if kind == _ZSTD:
        try:
            if zstandard.get_frame_parameters(body).content_size != size:
                raise MalformedMessage(f"compressed data does not say that it has {size} bytes")
            body = zstandard.ZstdDecompressor().decompress(body, max_output_size=size)
        except zstandard.ZstdError as problem:
            raise MalformedMessage(f"compressed data is damaged: {problem}") from problem
    elif kind != _PLAIN:
        raise MalformedMessage(f"data compressed in a way ({kind!r}) that this release does not know")
    if len(body) != size:
        raise MalformedMessage(f"{len(body)} bytes where {size} were announced")
    return body


def _compressor() -> zstandard.ZstdCompressor:
    """One a thread: making one costs more than a small pack."""
    compressor: zstandard.ZstdCompressor | None = getattr(_local, "compressor", None)
    if compressor is None:
        compressor = _local.compressor = zstandard.ZstdCompressor(_LEVEL)
    return compressor
