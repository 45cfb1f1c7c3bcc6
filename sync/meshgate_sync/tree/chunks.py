"""Cuts files into pieces: small files are one piece, large ones are cut at boundaries that their content defines.

FastCDC with 16, 64 and 256 KiB (minimum, average, maximum): one changed byte moves one piece, about 64 KiB, and the
list of pieces of a 100 MB file is 55 kB, of which a delta has only the part that changed. With smaller pieces the lists
would outweigh what they save; with larger ones a changed byte would move more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from pyfastcdc import FastCDC

from .tree import MAX_PIECE, Piece, piece_digest

MINIMUM = 16 * 1024
AVERAGE = 64 * 1024
MAX_SINGLE_PIECE = 64 * 1024
"""Files up to this many bytes are one piece."""

_WINDOW = 1024 * 1024
_HASH_THREADS = 2
_CUTTER = FastCDC(AVERAGE, min_size=MINIMUM, max_size=MAX_PIECE, normalized_chunking=2)


def cut(read: Callable[[int], bytes], size: int) -> tuple[tuple[Piece, ...], int]:
    """Returns the pieces of a stream expected to be ``size`` bytes long, and its real length.

    ``read(n)`` returns at most n bytes, none at the end. The end of a piece depends only on the bytes since its start,
    so cutting window by window finds the same pieces as cutting all at once.
    """
    if size <= MAX_SINGLE_PIECE:
        data = _read_up_to(read, MAX_SINGLE_PIECE + 1)
        if len(data) <= MAX_SINGLE_PIECE:
            return ((Piece(piece_digest(data), len(data)),) if data else ()), len(data)
        return _collect(_cut_large(read, data))
    return _collect(_cut_large(read, b""))


def _collect(pieces: Iterator[Piece]) -> tuple[tuple[Piece, ...], int]:
    found = tuple(pieces)
    return found, sum(piece.size for piece in found)


def _cut_large(read: Callable[[int], bytes], window: bytes) -> Iterator[Piece]:
    """Reads and cuts one window while the one before it is hashed by other threads. A file of one window is not worth
    a thread."""
    parts, rest, ended = _next_window(read, window)
    if ended:
        yield from _hashed(parts)
        return
    with ThreadPoolExecutor(_HASH_THREADS, thread_name_prefix="meshgate-hash") as pool:
        hashing = [pool.submit(_hashed, share) for share in _shares(parts)]
        while not ended:
            parts, rest, ended = _next_window(read, rest)
            for pieces in hashing:
                yield from pieces.result()
            hashing = [pool.submit(_hashed, share) for share in _shares(parts)]
        for pieces in hashing:
            yield from pieces.result()


def _next_window(read: Callable[[int], bytes], window: bytes) -> tuple[list[memoryview], bytes, bool]:
    """The complete pieces of a window that begins with ``window``, the bytes after them, and whether the file ended."""
    more = _read_up_to(read, _WINDOW - len(window))
    ended = len(window) + len(more) < _WINDOW
    parts, rest = _parts(memoryview(window + more), ended=ended)
    return parts, bytes(rest), ended


def _parts(view: memoryview, *, ended: bool) -> tuple[list[memoryview], memoryview]:
    """The complete pieces, and the bytes after them: unless the file has ``ended``, the last piece may be longer."""
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
    size = -(-len(parts) // _HASH_THREADS)
    return [parts[start : start + size] for start in range(0, len(parts), max(size, 1))]


def _hashed(parts: list[memoryview]) -> list[Piece]:
    return [Piece(piece_digest(part), len(part)) for part in parts]


def _read_up_to(read: Callable[[int], bytes], count: int) -> bytes:
    parts = []
    while count:
        data = read(count)
        if not data:
            break
        parts.append(data)
        count -= len(data)
    return parts[0] if len(parts) == 1 else b"".join(parts)
