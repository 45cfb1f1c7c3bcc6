"""The buffers of messages: how a received one is held, and what may be sent.

A large buffer arrives in chunks. Joining them costs a copy of the whole, which who forwards or digests the
buffer need not pay: so a received buffer is its chunks, and joining is the reader's choice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pickle import PickleBuffer
from typing import TypeAlias

__all__ = ["Buffer", "Fragments", "FragmentsFile", "Sendable"]

LARGE = 64 * 1024  # takes some 10 us to copy

Buffer: TypeAlias = "bytes | bytearray | memoryview | PickleBuffer"


class Fragments:
    """One received buffer, in the pieces it arrived in. Immutable; ``len()`` is its size in bytes."""

    __slots__ = ("_length", "fragments")

    def __init__(self, fragments: tuple[bytes | memoryview, ...] = (), length: int | None = None) -> None:
        self.fragments = fragments
        self._length = sum(map(len, fragments)) if length is None else length

    def __len__(self) -> int:
        return self._length

    def join(self) -> bytes:
        """The buffer in one piece. No copy where it arrived in one."""
        if len(self.fragments) == 1 and isinstance(self.fragments[0], bytes):
            return self.fragments[0]
        return b"".join(self.fragments)

    def open(self) -> FragmentsFile:
        """The buffer as a file, for who reads it once and in order, such as ``pickle``."""
        return FragmentsFile(self.fragments)

    def joined_bytearray(self) -> bytearray:
        """A copy that may be written to, made in one pass."""
        return bytearray().join(self.fragments)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fragments):
            return NotImplemented
        return self._length == other._length and self.join() == other.join()

    __hash__ = None  # type: ignore[assignment]  # hashing would join

    def __repr__(self) -> str:
        return f"<Fragments {self._length} bytes in {len(self.fragments)}>"


class FragmentsFile:
    """A file of fragments: nothing is joined, and reading a large piece lets other threads run in between."""

    __slots__ = ("_at", "_fragments", "_index")

    def __init__(self, fragments: Sequence[bytes | memoryview]) -> None:
        self._fragments = [memoryview(fragment) for fragment in fragments]
        self._index = 0
        self._at = 0  # in the fragment that is being read

    def read(self, size: int) -> bytes:
        """``size`` bytes, or what is left."""
        return b"".join(self._pieces(size))

    def readinto(self, buffer: memoryview) -> int:
        """Fills ``buffer`` as far as there is data; returns how far."""
        target = memoryview(buffer).cast("B")
        at = 0
        for piece in self._pieces(len(target)):
            target[at : at + len(piece)] = piece
            at += len(piece)
        return at

    def readline(self) -> bytes:
        """Up to and with the next line end."""
        line = bytearray()
        while not line.endswith(b"\n") and (byte := self.read(1)):
            line += byte
        return bytes(line)

    def _pieces(self, size: int) -> Iterator[memoryview]:
        while size and self._index < len(self._fragments):
            fragment = self._fragments[self._index]
            piece = fragment[self._at : self._at + size]
            size -= len(piece)
            self._at += len(piece)
            if self._at == len(fragment):
                self._index += 1
                self._at = 0
            yield piece
            if len(piece) >= LARGE:
                time.sleep(0)  # lets go of the interpreter: who waits for it would otherwise wait 5 ms each time


# A buffer to send: whole, in pieces that follow one another, or as it was received.
Sendable: TypeAlias = "Buffer | Sequence[Buffer] | Fragments"


def flatten(buffer: Sendable) -> tuple[int, list[bytes | memoryview]]:
    """The size of ``buffer`` and its pieces as flat views, empty ones left out, nothing copied.

    Raises ``TypeError`` for a view whose memory is not contiguous (``BufferError`` from ``PickleBuffer.raw``).
    """
    if isinstance(buffer, Fragments):
        return len(buffer), list(buffer.fragments)
    parts: Sequence[Buffer] = buffer if isinstance(buffer, (list, tuple)) else (buffer,)
    pieces: list[bytes | memoryview] = []
    size = 0
    for part in parts:
        piece = part if isinstance(part, bytes) else flat_view(part)
        length = len(piece)
        if length:
            size += length
            pieces.append(piece)
    return size, pieces


def flat_view(part: bytearray | memoryview | PickleBuffer) -> memoryview:
    if isinstance(part, PickleBuffer):
        return part.raw()
    view = memoryview(part)
    if view.nbytes == 0:
        return memoryview(b"")
    return view if view.ndim == 1 and view.format == "B" and view.c_contiguous else view.cast("B")
