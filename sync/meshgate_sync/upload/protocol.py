"""The messages between client and engine about versions: headers, with buffers beside them.

They travel in one stream of the session, so they arrive in order and yield to calls::

    client -> engine   SyncOffer    a version: only its digest, or a delta, small ones with their pieces
    engine -> client   SyncNeed     I do not have the base; I have these versions
    engine -> client   SyncWants    send these pieces
    client -> engine   SyncPieces   pieces
    client -> engine   SyncGone     a file changed after the scan: a newer version follows
    engine -> client   SyncStatus   how many hosts are ready for this version

Digests are 64 hex digits in headers, 32 bytes in buffers. A spawn that names a version may arrive before the version;
it waits. Offers do not wait for each other's answers: the base of one is any version offered earlier in the session.
"""

from __future__ import annotations

import threading
from typing import Annotated, Literal

import zstandard
from pydantic import BaseModel, ConfigDict, Field

from ..errors import MalformedMessage
from ..tree.codec import Reader, Writer
from ..tree.tree import DIGEST_SIZE, MAX_PIECE, piece_digest, short

MAX_DELTA = 128 * 1024 * 1024
MAX_PACK = 4 * 1024 * 1024
"""Maximum bytes of a delta, and of a pack of pieces, before compression."""

Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Size = Annotated[int, Field(ge=0, le=2**53)]

_SMALL = 256 * 1024
_LEVEL = 3
_LARGE_PARAMETERS = zstandard.ZstdCompressionParameters(
    window_log=21, hash_log=16, chain_log=16, search_log=1, min_match=6, strategy=zstandard.STRATEGY_DFAST
)
"""Level 3 with longer matches and a smaller table: packs of 2 MiB compress better than packs of 1 MiB with plain
level 3, and in 10 to 33 % less time."""
_MAX_RATIO = 0.98
_PLAIN = b"\0"
_ZSTD = b"\1"
_SAMPLE = 8 * 1024

_local = threading.local()


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class SyncOffer(_Model):
    """Version ``root``. Buffers: none if the engine may have it already; else the delta (``delta_size`` bytes when
    decompressed) and, if ``pack_size`` is not 0, a pack of pieces."""

    type: Literal["sync_offer"] = "sync_offer"
    root: Digest
    delta_size: Annotated[int, Field(ge=0, le=MAX_DELTA)] = 0
    pack_size: Annotated[int, Field(ge=0, le=MAX_PACK)] = 0


class SyncNeed(_Model):
    """The engine does not have the base of the offer of ``root``. Offer it again as a delta from one of ``held``
    (newest first), or as a full delta."""

    type: Literal["sync_need"] = "sync_need"
    root: Digest
    held: tuple[Digest, ...] = Field(default=(), max_length=64)


class SyncWants(_Model):
    """Buffer: the digests of the pieces wanted for ``root``, concatenated."""

    type: Literal["sync_wants"] = "sync_wants"
    root: Digest


class SyncPieces(_Model):
    """Buffer: a pack, ``size`` bytes when decompressed."""

    type: Literal["sync_pieces"] = "sync_pieces"
    root: Digest
    size: Annotated[int, Field(ge=0, le=MAX_PACK)]


class SyncGone(_Model):
    """``path`` is no longer what it was in ``root``. A newer version follows, unless ``why`` says why none does."""

    type: Literal["sync_gone"] = "sync_gone"
    root: Digest
    path: Annotated[str, Field(max_length=4096)] = ""
    why: Annotated[str, Field(max_length=4096)] = ""


class SyncStatus(_Model):
    """``ready`` of ``hosts`` hosts can run ``root``; ``failed``: why others cannot, as many as fit into a message;
    ``failures``: how many these are in all; ``lost``: those of ``failed`` that have ended or were replaced. ``sent``:
    bytes of pieces that the gateway has sent in this session."""

    type: Literal["sync_status"] = "sync_status"
    root: Digest
    ready: Size
    hosts: Size
    failed: dict[str, str] = {}
    failures: Size = 0  # 0 if ``failed`` has all of them
    lost: tuple[str, ...] = ()
    sent: Size = 0


def pack(pieces: list[tuple[bytes, bytes]]) -> bytes:
    """Encodes pieces, (digest, data), as one buffer."""
    out = Writer()
    for digest, data in pieces:
        out.digest(digest)
        out.long(data)
    return out.finish()


def unpack(data: bytes) -> list[tuple[bytes, bytes]]:
    """Decodes a pack and hashes each piece, so run it in a thread. Raises MalformedMessage, also if a digest is
    wrong."""
    reader = Reader(data)
    pieces = []
    while reader.remaining:
        digest, piece = reader.digest(), reader.long()
        if not 0 < len(piece) <= MAX_PIECE:
            raise MalformedMessage(f"invalid piece size: {len(piece)} bytes (1 to {MAX_PIECE} allowed)")
        if piece_digest(piece) != digest:
            raise MalformedMessage(f"piece {short(digest)} does not match its digest")
        pieces.append((digest, piece))
    return pieces


def join_digests(digests: tuple[bytes, ...]) -> bytes:
    return b"".join(digests)


def split_digests(data: bytes) -> tuple[bytes, ...]:
    """Raises MalformedMessage."""
    if len(data) % DIGEST_SIZE:
        raise MalformedMessage(f"invalid list of digests: {len(data)} bytes are not a multiple of {DIGEST_SIZE}")
    return tuple([data[start : start + DIGEST_SIZE] for start in range(0, len(data), DIGEST_SIZE)])


# Compression from the client to the gateway, the one slow link, if the data is compressible.
#
# Inside the cluster pieces are not compressed: links there are faster than the codecs of the standard library, which is
# all that a bare host has.


def compress(data: bytes) -> bytes:
    """Returns the data, compressed or not, after one byte that says which."""
    if len(data) > 8 * _SAMPLE:
        sample = data[:_SAMPLE] + data[-_SAMPLE:]  # the two halves of a pack may be different files
        if len(_compressor(len(sample)).compress(sample)) > _MAX_RATIO * len(sample):
            return _PLAIN + data
    compressed = _compressor(len(data)).compress(data)
    return _ZSTD + compressed if len(compressed) < _MAX_RATIO * len(data) else _PLAIN + data


def decompress(data: bytes, size: int) -> bytes:
    """Returns the ``size`` bytes that were compressed. Raises MalformedMessage before it allocates more than that."""
    kind = data[:1]
    if kind == _ZSTD:
        packed = memoryview(data)[1:]
        try:
            if zstandard.get_frame_parameters(packed).content_size != size:
                raise MalformedMessage(f"compressed data does not have the announced size of {size} bytes")
            body = zstandard.ZstdDecompressor().decompress(packed, max_output_size=size)
        except zstandard.ZstdError as error:
            raise MalformedMessage(f"compressed data is corrupt: {error}") from error
    elif kind == _PLAIN:
        body = data[1:]
    else:
        raise MalformedMessage(f"unknown compression {kind!r}: the client may run another version of meshgate")
    if len(body) != size:
        raise MalformedMessage(f"data has {len(body)} bytes, {size} were announced")
    return body


def _compressor(size: int) -> zstandard.ZstdCompressor:
    """A compressor for data of ``size`` bytes. Cached for each thread: making one costs more than a small pack."""
    kind = "small" if size <= _SMALL else "large"
    compressor: zstandard.ZstdCompressor | None = getattr(_local, kind, None)
    if compressor is None:
        if kind == "small":
            compressor = zstandard.ZstdCompressor(_LEVEL)
        else:
            compressor = zstandard.ZstdCompressor(compression_params=_LARGE_PARAMETERS)
        setattr(_local, kind, compressor)
    return compressor
