"""What the laptop and the engine say to each other about versions: headers, with buffers beside them.

All of it travels in one stream of the session, so it arrives in order and yields to calls::

    laptop -> engine   SyncOffer    a version: nothing but its name, or a delta, small ones with their pieces
    engine -> laptop   SyncNeed     I do not hold its base; these I hold
    engine -> laptop   SyncWants    pieces that I lack
    laptop -> engine   SyncPieces   here they are
    laptop -> engine   SyncGone     a file has changed since: a newer version will follow
    engine -> laptop   SyncStatus   so many hosts are ready for this version

Digests are 64 hex digits in headers, 32 bytes in buffers. A spawn that names a version may come before the version
does; it waits. Offers build on each other without waiting for answers: the base of one is any version offered
earlier in the session.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from .codec import Reader, Writer
from .digest import DIGEST_SIZE, piece_digest, short
from .errors import MalformedMessage
from .tree import MAX_PIECE

__all__ = [
    "MAX_DELTA", "MAX_PACK", "SyncGone", "SyncNeed", "SyncOffer", "SyncPieces", "SyncStatus", "SyncWants",
    "join_digests", "pack", "split_digests", "unpack",
]  # fmt: skip

MAX_DELTA = 128 * 1024 * 1024
MAX_PACK = 4 * 1024 * 1024
"""Bytes of a delta, and of a pack of pieces, before compression."""

Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Size = Annotated[int, Field(ge=0, le=2**53)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class SyncOffer(_Model):
    """Version ``root``. Buffers: none, where the engine may hold it already; else the delta (``delta_size`` bytes
    when unpacked) and, where ``pack_size`` is not 0, a pack of pieces."""

    type: Literal["sync_offer"] = "sync_offer"
    root: Digest
    delta_size: Annotated[int, Field(ge=0, le=MAX_DELTA)] = 0
    pack_size: Annotated[int, Field(ge=0, le=MAX_PACK)] = 0


class SyncNeed(_Model):
    """The engine cannot make sense of the offer of ``root``; a delta against one of ``held`` (newest first), or
    against nothing, it would understand."""

    type: Literal["sync_need"] = "sync_need"
    root: Digest
    held: tuple[Digest, ...] = Field(default=(), max_length=64)


class SyncWants(_Model):
    """Buffer: the digests of the pieces wanted for ``root``, one after the other."""

    type: Literal["sync_wants"] = "sync_wants"
    root: Digest


class SyncPieces(_Model):
    """Buffer: a pack, ``size`` bytes when unpacked."""

    type: Literal["sync_pieces"] = "sync_pieces"
    root: Digest
    size: Annotated[int, Field(ge=0, le=MAX_PACK)]


class SyncGone(_Model):
    """``path`` is no longer what it is in ``root``. A newer version follows; or else ``why`` none does."""

    type: Literal["sync_gone"] = "sync_gone"
    root: Digest
    path: Annotated[str, Field(max_length=4096)] = ""
    why: Annotated[str, Field(max_length=4096)] = ""


class SyncStatus(_Model):
    """``ready`` of ``hosts`` hosts can run ``root``; ``failed`` says why others cannot. ``sent``: bytes of pieces that
    have left the gateway in this session."""

    type: Literal["sync_status"] = "sync_status"
    root: Digest
    ready: Size
    hosts: Size
    failed: dict[str, str] = {}
    sent: Size = 0


def pack(pieces: list[tuple[bytes, bytes]]) -> bytes:
    """Pieces, (digest, data), as one buffer."""
    out = Writer()
    for digest, data in pieces:
        out.digest(digest)
        out.long(data)
    return out.finish()


def unpack(data: bytes) -> list[tuple[bytes, bytes]]:
    """The pieces, each hashed: so for a thread. Raises MalformedMessage, also when one is not what its digest says."""
    reader = Reader(data)
    pieces = []
    while reader.remaining:
        digest, piece = reader.digest(), reader.long()
        if not 0 < len(piece) <= MAX_PIECE:
            raise MalformedMessage(f"a piece of {len(piece)} bytes")
        if piece_digest(piece) != digest:
            raise MalformedMessage(f"piece {short(digest)} is not what its digest says")
        pieces.append((digest, piece))
    return pieces


def join_digests(digests: tuple[bytes, ...]) -> bytes:
    return b"".join(digests)


def split_digests(data: bytes) -> tuple[bytes, ...]:
    """Raises MalformedMessage."""
    if len(data) % DIGEST_SIZE:
        raise MalformedMessage(f"{len(data)} bytes are no digests")
    return tuple([data[start : start + DIGEST_SIZE] for start in range(0, len(data), DIGEST_SIZE)])
