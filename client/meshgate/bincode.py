"""The bytes in which Monarch pickles its shapes, so that ours read its and it reads ours.

Little-endian: an unsigned number is eight bytes, a list its length and its elements, a text its length and its
UTF-8. Raises ``ValueError`` on bytes that are cut short or go on.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

__all__ = ["Reader", "dump_number", "dump_numbers", "dump_texts"]

_NUMBER = struct.Struct("<Q")


def dump_number(value: int) -> bytes:
    return _NUMBER.pack(value)


def dump_numbers(values: Iterable[int]) -> bytes:
    numbers = list(values)
    return struct.pack(f"<{len(numbers) + 1}Q", len(numbers), *numbers)


def dump_texts(values: Iterable[str]) -> bytes:
    texts = [value.encode() for value in values]
    return b"".join([dump_number(len(texts)), *(dump_number(len(text)) + text for text in texts)])


class Reader:
    """Reads values one after the other; ``end`` checks that nothing is left."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def _take(self, size: int) -> bytes:
        piece = self._data[self._at : self._at + size]
        if len(piece) != size:
            raise ValueError(f"UnexpectedEnd {{ additional: {size - len(piece)} }}")
        self._at += size
        return piece

    def number(self) -> int:
        return int(_NUMBER.unpack(self._take(_NUMBER.size))[0])

    def numbers(self) -> list[int]:
        count = self.number()
        return list(struct.unpack(f"<{count}Q", self._take(count * _NUMBER.size)))

    def texts(self) -> list[str]:
        return [self._take(self.number()).decode() for _ in range(self.number())]

    def end(self) -> None:
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes too many")
