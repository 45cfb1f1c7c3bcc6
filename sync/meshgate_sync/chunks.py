"""Cuts files into pieces: small ones whole, large ones where their content says.

FastCDC with 16, 64 and 256 KiB (least, average, most): one changed byte moves one piece, about 64 KiB, and the
list of pieces of a 100 MB file is 55 kB, of which a delta tells only the part that changed. Smaller pieces would
make the lists outweigh what they save, larger ones would move more for one byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from pyfastcdc import FastCDC

from .digest import piece_digest
from .tree import MAX_PIECE, Piece

__all__ = ["AVERAGE", "WHOLE", "cut"]

LEAST = 16 * 1024
AVERAGE = 64 * 1024
WHOLE = 64 * 1024
"""Files up to this many bytes are one piece."""

_WINDOW = 1024 * 1024
_HASHING = 2
_CUTTER = FastCDC(AVERAGE, min_size=LEAST, max_size=MAX_PIECE, normalized_chunking=2)


def cut(read: Callable[[int], bytes], size: int) -> tuple[tuple[Piece, ...], int]:
    """The pieces of a stream expected to be ``size`` bytes long, and how many bytes there really were.

    ``read(n)`` returns at most n bytes, none at the end. Where a piece ends depends on the bytes since the piece
    began alone, so cutting window by window finds the same pieces as cutting all at once.
    """
    if size <= WHOLE:
        data = _exactly(read, WHOLE + 1)
        if len(data) <= WHOLE:
            return ((Piece(piece_digest(data), len(data)),) if data else ()), len(data)
        return _collect(_cut_large(read, data))
    return _collect(_cut_large(read, b""))


def _collect(pieces: Iterator[Piece]) -> tuple[tuple[Piece, ...], int]:
    found = tuple(pieces)
    return found, sum(piece.size for piece in found)


def _cut_large(read: Callable[[int], bytes], window: bytes) -> Iterator[Piece]:
    """Reads and cuts one window while the one before it is hashed, by other processors where there are any."""
    hashing: list[Future[list[Piece]]] = []
    with ThreadPoolExecutor(_HASHING, thread_name_prefix="meshgate-hash") as pool:
        ended = False
        while not ended:
            more = _exactly(read, _WINDOW - len(window))
            ended = len(window) + len(more) < _WINDOW
            window += more
            parts, rest = _parts(memoryview(window), ended=ended)
            if ended and not hashing:
                yield from _named(parts)  # a file of one window is not worth a thread
                return
            before, hashing = hashing, [pool.submit(_named, share) for share in _shares(parts)]
            for named in before:
                yield from named.result()
            window = bytes(rest)
        for named in hashing:
            yield from named.result()


def _parts(view: memoryview, *, ended: bool) -> tuple[list[memoryview], memoryview]:
    """Where the content says that pieces end; and what is left, for more may follow unless the file has ``ended``."""
    parts = []
    consumed = 0
    for chunk in _CUTTER.cut_buf(view):
        end = chunk.offset + chunk.length
        if end == len(view) and not ended:
            break
        parts.append(view[chunk.offset : end])
        consumed = end
    return parts, view[consumed:]


def _shares(parts: list[memoryview]) -> list[list[memoryview]]:
    size = -(-len(parts) // _HASHING)
    return [parts[start : start + size] for start in range(0, len(parts), max(size, 1))]


def _named(parts: list[memoryview]) -> list[Piece]:
    return [Piece(piece_digest(part), len(part)) for part in parts]


def _exactly(read: Callable[[int], bytes], count: int) -> bytes:
    parts = []
    while count:
        data = read(count)
        if not data:
            break
        parts.append(data)
        count -= len(data)
    return parts[0] if len(parts) == 1 else b"".join(parts)
