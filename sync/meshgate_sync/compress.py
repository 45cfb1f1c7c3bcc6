"""Compression on the way from the laptop to the gateway, where that helps: the one slow link of the journey.

Inside the cluster pieces travel as they are: links are faster there than any codec of the standard library, which is
all that a bare host has.
"""

from __future__ import annotations

import threading

import zstandard

from .errors import MalformedMessage

__all__ = ["squeeze", "unsqueeze"]

_SMALL = 256 * 1024
_LEVEL = 3
_OF_LARGE = zstandard.ZstdCompressionParameters(
    window_log=21, hash_log=16, chain_log=16, search_log=1, min_match=6, strategy=zstandard.STRATEGY_DFAST
)
"""Level 3 with longer matches and a smaller table: packs of 2 MiB are smaller with it than packs of 1 MiB with level 3
itself, and it takes a tenth to a third less time."""
_WORTH = 0.98
_PLAIN = b"\0"
_ZSTD = b"\1"
_PROBE = 8 * 1024

_local = threading.local()


def squeeze(data: bytes) -> bytes:
    """``data`` with a byte before it that says how it is written."""
    if len(data) > 8 * _PROBE:
        probe = data[:_PROBE] + data[-_PROBE:]  # one half of a pack may be another file than the other half
        if len(_compressor(len(probe)).compress(probe)) > _WORTH * len(probe):
            return _PLAIN + data
    smaller = _compressor(len(data)).compress(data)
    return _ZSTD + smaller if len(smaller) < _WORTH * len(data) else _PLAIN + data


def unsqueeze(data: bytes, size: int) -> bytes:
    """The ``size`` bytes that were squeezed. Raises MalformedMessage, before more than that is allocated."""
    kind = data[:1]
    if kind == _ZSTD:
        packed = memoryview(data)[1:]
        try:
            if zstandard.get_frame_parameters(packed).content_size != size:
                raise MalformedMessage(f"compressed data does not say that it has {size} bytes")
            body = zstandard.ZstdDecompressor().decompress(packed, max_output_size=size)
        except zstandard.ZstdError as problem:
            raise MalformedMessage(f"compressed data is damaged: {problem}") from problem
    elif kind == _PLAIN:
        body = data[1:]
    else:
        raise MalformedMessage(f"data compressed in a way ({kind!r}) that this release does not know")
    if len(body) != size:
        raise MalformedMessage(f"{len(body)} bytes where {size} were announced")
    return body


def _compressor(size: int) -> zstandard.ZstdCompressor:
    """For so many bytes. One of each kind a thread: making one costs more than a small pack."""
    kind = "small" if size <= _SMALL else "large"
    compressor: zstandard.ZstdCompressor | None = getattr(_local, kind, None)
    if compressor is None:
        if kind == "small":
            compressor = zstandard.ZstdCompressor(_LEVEL)
        else:
            compressor = zstandard.ZstdCompressor(compression_params=_OF_LARGE)
        setattr(_local, kind, compressor)
    return compressor
