"""The buffers of messages, received and to be sent.

A large buffer arrives in chunks. Joining them copies the buffer, which a reader that forwards or hashes it need not
do: so a received buffer is kept as its chunks, and the reader decides whether to join them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pickle import PickleBuffer
from typing import TypeAlias

RELEASE_BYTES = 1 << 20  # about 0.1 ms to copy; to release the GIL takes as long, since a sleep lasts 50 us and more

Buffer: TypeAlias = "bytes | bytearray | memoryview | PickleBuffer"


class Fragments:
    """A received buffer, in the pieces in which it arrived. Immutable; ``len()`` is its size in bytes."""

    __slots__ = ("_length", "fragments")

    def __init__(self, fragments: tuple[bytes | memoryview, ...] = (), length: int | None = None) -> None:
        self.fragments = fragments
        self._length = sum(map(len, fragments)) if length is None else length

    def __len__(self) -> int:
        return self._length

    def join(self) -> bytes:
        """The buffer in one piece; not copied if it arrived in one."""
        if len(self.fragments) == 1 and isinstance(self.fragments[0], bytes):
            return self.fragments[0]
        return b"".join(self.fragments)

    def open(self) -> FragmentsFile:
        """The buffer as a file, for sequential readers such as ``pickle``."""
        return FragmentsFile(self.fragments)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fragments):
            return NotImplemented
        return self._length == other._length and self.join() == other.join()

    __hash__ = None  # type: ignore[assignment]  # hashing would have to join

    def __repr__(self) -> str:
        return f"<Fragments {self._length} bytes in {len(self.fragments)}>"


class FragmentsFile:
    """A file of fragments. Nothing is joined, and long reads let other threads run."""

    __slots__ = ("_at", "_fragments", "_index", "_since_release")

    def __init__(self, fragments: Sequence[bytes | memoryview]) -> None:
        self._fragments = [memoryview(fragment) for fragment in fragments]
        self._index = 0
        self._at = 0  # in the current fragment
        self._since_release = 0  # bytes

    def read(self, size: int) -> bytes:
        """The next ``size`` bytes, or all that are left."""
        return b"".join(self._pieces(size))

    def readinto(self, buffer: memoryview) -> int:
        """Fills ``buffer`` as far as possible and returns the number of bytes."""
        target = memoryview(buffer).cast("B")
        at = 0
        for piece in self._pieces(len(target)):
            target[at : at + len(piece)] = piece
            at += len(piece)
        return at

    def readline(self) -> bytes:
        """The bytes up to and including the next line end."""
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
            self._since_release += len(piece)
            if self._since_release >= RELEASE_BYTES:
                self._since_release = 0
                time.sleep(0)  # releases the GIL, which a waiting thread would otherwise get after 5 ms


# A buffer to send: in one piece, in consecutive pieces, or as it was received.
Sendable: TypeAlias = "Buffer | Sequence[Buffer] | Fragments"


def flatten(buffer: Sendable) -> tuple[int, list[bytes | memoryview]]:
    """The size of ``buffer`` and its non-empty pieces as flat views; nothing is copied.

    Raises ``TypeError``, or ``BufferError`` for a ``PickleBuffer``, if the memory is not contiguous.
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
