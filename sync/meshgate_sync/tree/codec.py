"""Reads and writes the binary messages of the sync. Every length is checked before memory is allocated."""

from __future__ import annotations

import struct

from ..errors import MalformedMessage
from .tree import DIGEST_SIZE

_U8 = struct.Struct(">B")
_U16 = struct.Struct(">H")
_U32 = struct.Struct(">I")


class Writer:
    """Appends to one buffer. Raises ``struct.error`` if a length does not fit its field, which is a caller's bug."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def u8(self, value: int) -> None:
        self._parts.append(_U8.pack(value))

    def u32(self, value: int) -> None:
        self._parts.append(_U32.pack(value))

    def digest(self, value: bytes) -> None:
        assert len(value) == DIGEST_SIZE
        self._parts.append(value)

    def short(self, value: bytes) -> None:
        """At most 65,535 bytes."""
        self._parts += (_U16.pack(len(value)), value)

    def long(self, value: bytes) -> None:
        self._parts += (_U32.pack(len(value)), value)

    def raw(self, value: bytes) -> None:
        self._parts.append(value)

    def finish(self) -> bytes:
        return b"".join(self._parts)


class Reader:
    """Reads fields from a buffer in order. Raises MalformedMessage if the buffer is too short for one."""

    __slots__ = ("_data", "_offset")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._offset = 0

    @property
    def remaining(self) -> int:
        return len(self._data) - self._offset

    def take(self, count: int) -> bytes:
        end = self._offset + count
        if end > len(self._data):
            raise MalformedMessage(f"truncated message: a field needs {count} bytes, {self.remaining} are left")
        taken = self._data[self._offset : end]
        self._offset = end
        return taken

    def u8(self) -> int:
        return self.take(1)[0]

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "big")

    def digest(self) -> bytes:
        return self.take(DIGEST_SIZE)

    def short(self) -> bytes:
        return self.take(int.from_bytes(self.take(2), "big"))

    def long(self) -> bytes:
        return self.take(self.u32())

    def count(self, size: int) -> int:
        """The number of items that follow, each at least ``size`` bytes long. They must all fit into the buffer."""
        count = self.u32()
        if count * size > self.remaining:
            raise MalformedMessage(f"truncated message: {count} items of {size} bytes, {self.remaining} are left")
        return count

    def finish(self) -> None:
        if self.remaining:
            raise MalformedMessage(f"message has {self.remaining} bytes after its end")
