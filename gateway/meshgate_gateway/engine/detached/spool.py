"""Byte strings that wait to be read: in memory up to a limit, then on disk up to another.

The files have no name, so that none is left behind however the process ends.
"""

from __future__ import annotations

import logging
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, TypeAlias, cast

log = logging.getLogger(__name__)

SEGMENT_BYTES = 16 * 2**20
OVERHEAD = 320  # bytes of memory that a blob takes besides its pieces, roughly

Piece: TypeAlias = "bytes | memoryview"


@dataclass(slots=True)
class _Segment:
    """A file that blobs are appended to. It is closed, and so freed, once all of them are dropped."""

    file: BinaryIO
    size: int = 0
    blobs: int = 0


@dataclass(slots=True, eq=False)
class Blob:
    """Pieces that a spool keeps: in memory, or in ``segment`` at ``offset``."""

    nbytes: int
    pieces: tuple[Piece, ...] | None = None
    segment: _Segment | None = None
    offset: int = 0
    lengths: tuple[int, ...] = ()


class Spool:
    """Keeps up to ``memory`` bytes in memory and then up to ``disk`` bytes in files, for which it needs up to ``index``
    further bytes of memory: what is on disk has its overhead there."""

    def __init__(self, memory: int, disk: int, index: int = 16 * 2**20) -> None:
        self._memory, self._disk, self._index = memory, disk, index
        self._in_memory = self._on_disk = self._indexed = 0
        self._segments: list[_Segment] = []
        self._failed = False
        weakref.finalize(self, _close, self._segments)

    @property
    def nbytes(self) -> int:
        """The bytes that are kept, wherever they are."""
        return self._in_memory + self._on_disk

    def put(self, pieces: Sequence[Piece]) -> Blob | None:
        """Keeps the pieces, which must not change. Returns None if there is no space for them."""
        nbytes = sum(map(len, pieces))
        if self._in_memory + nbytes + OVERHEAD <= self._memory:
            self._in_memory += nbytes + OVERHEAD
            return Blob(nbytes, tuple(pieces))
        if self._on_disk + nbytes > self._disk or self._indexed + OVERHEAD > self._index:
            return None
        try:
            return self._write(pieces, nbytes)
        except OSError as error:  # the disk is full, or there is no directory for temporary files
            if not self._failed:
                self._failed = True
                log.warning("cannot keep unread data of the session on disk: %s", error)
            return None

    def _write(self, pieces: Sequence[Piece], nbytes: int) -> Blob:
        if not self._segments or self._segments[-1].size >= SEGMENT_BYTES:
            # Buffering would keep what could not be written, and write it later.
            self._segments.append(_Segment(cast("BinaryIO", tempfile.TemporaryFile(buffering=0))))  # noqa: SIM115
        segment = self._segments[-1]
        segment.file.seek(segment.size)
        for piece in pieces:
            view = memoryview(piece)
            while view:
                view = view[segment.file.write(view) :]
        blob = Blob(nbytes, None, segment, segment.size, tuple(map(len, pieces)))
        segment.size += nbytes
        segment.blobs += 1
        self._on_disk += nbytes
        self._indexed += OVERHEAD
        return blob

    def get(self, blob: Blob) -> tuple[Piece, ...]:
        """The pieces of a blob that has not been dropped. Raises OSError if they cannot be read."""
        if blob.pieces is not None:
            return blob.pieces
        assert blob.segment is not None, "the blob was dropped"
        blob.segment.file.seek(blob.offset)
        return tuple(_read(blob.segment.file, length) for length in blob.lengths)

    def drop(self, blob: Blob) -> None:
        """Forgets a blob. Does nothing the second time."""
        segment, blob.segment = blob.segment, None
        if blob.pieces is not None:
            self._in_memory -= blob.nbytes + OVERHEAD
            blob.pieces = None
        elif segment is not None:
            self._indexed -= OVERHEAD
            segment.blobs -= 1
            if not segment.blobs:  # its space on disk is used until then
                self._on_disk -= segment.size
                self._segments.remove(segment)
                segment.file.close()

    def close(self) -> None:
        """Frees everything."""
        _close(self._segments)
        self._in_memory = self._on_disk = self._indexed = 0


def _close(segments: list[_Segment]) -> None:
    for segment in segments:
        segment.file.close()
    segments.clear()


def _read(file: BinaryIO, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = file.read(length - len(data))
        if not part:
            raise OSError(f"a temporary file ended after {len(data)} of {length} bytes")
        data += part
    return bytes(data)
