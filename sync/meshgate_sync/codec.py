"""Reads and writes the binary messages of the sync, with every length checked before memory is taken."""

from __future__ import annotations

import struct

from .digest import DIGEST_SIZE
from .errors import MalformedMessage

__all__ = ["Reader", "Writer"]

_U8 = struct.Struct(">B")
_U16 = struct.Struct(">H")
_U32 = struct.Struct(">I")


class Writer:
    """Appends to one buffer. Lengths that do not fit their field are a caller's bug: ``struct.error``."""

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
    """Takes fields off a buffer in order. Raises MalformedMessage when the buffer is too short for one."""

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
            raise MalformedMessage(f"a field of {count} bytes where {self.remaining} are left")
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
        """A number of items of at least ``size`` bytes each, all of which must still be in the buffer."""
        count = self.u32()
        if count * size > self.remaining:
            raise MalformedMessage(f"{count} items of {size} bytes where {self.remaining} bytes are left")
        return count

    def finish(self) -> None:
        if self.remaining:
            raise MalformedMessage(f"{self.remaining} bytes after the end of the message")
