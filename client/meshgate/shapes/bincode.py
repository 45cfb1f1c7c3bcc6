"""Decoding of bincode, the format in which Monarch pickles its shapes.

Results of endpoints contain these bytes: a ``Point``, a ``ValueMesh``, or the region of a mesh. The format is
little-endian: an unsigned integer has eight bytes, a list its length and its items, a string its length and its UTF-8.
"""

from __future__ import annotations

import struct

_INTEGER = struct.Struct("<Q")


class Reader:
    """Decodes values one after the other. Raises ``ValueError`` if the data is truncated or has trailing bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def _take(self, size: int) -> bytes:
        piece = self._data[self._position : self._position + size]
        if len(piece) != size:
            raise ValueError(f"truncated data: {size - len(piece)} bytes are missing")
        self._position += size
        return piece

    def integer(self) -> int:
        return int(_INTEGER.unpack(self._take(_INTEGER.size))[0])

    def integers(self) -> list[int]:
        count = self.integer()
        return list(struct.unpack(f"<{count}Q", self._take(count * _INTEGER.size)))

    def strings(self) -> list[str]:
        return [self._take(self.integer()).decode() for _ in range(self.integer())]

    def end(self) -> None:
        """Checks that nothing is left."""
        if self._position != len(self._data):
            raise ValueError(f"{len(self._data) - self._position} trailing bytes")
