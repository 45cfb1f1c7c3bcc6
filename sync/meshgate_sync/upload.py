"""The exchange between client and engine about versions: its messages, and the client's side.

It never runs on hosts and never writes to a store. Messages are headers, with buffers beside them.

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

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Literal

import zstandard
from pydantic import BaseModel, ConfigDict, Field

from .errors import MalformedMessage, readable
from .tree.codec import Reader, Writer
from .tree.delta import INLINE_LIMIT, Delta, diff, encode, full_delta, transfer_size, transferred_pieces
from .tree.tree import DIGEST_SIZE, EMPTY, MAX_PIECE, Directory, piece_digest, short

MAX_DELTA = 128 * 1024 * 1024
MAX_PACK = 4 * 1024 * 1024
"""Maximum bytes of a delta, and of a pack of pieces, before compression."""

Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Size = Annotated[int, Field(ge=0, le=2**53)]

_LOOK_INTERVAL = 0.5  # seconds
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
_PACK = 2 * 1024 * 1024
_PACK_THREADS = 2
_PIECE_OVERHEAD = 36
_OFFER_BY_DIGEST = 64 * 1024
_MAX_VERSIONS = 8

_Places = Mapping[bytes, tuple[bytes, int, int]]
"""The place of each piece by digest: path, offset, size."""

Message = tuple["SyncOffer | SyncPieces | SyncGone", tuple[bytes, ...]]
"""A header and its buffers."""


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


class Patience:
    """For how long to wait for something that moves: until nothing has for ``timeout`` seconds. ``left`` of them are
    left. Look every ``pause`` seconds."""

    def __init__(self, timeout: float, now: float) -> None:
        self.left = self._timeout = timeout
        self._looked = now
        self._seen: object = None

    @property
    def pause(self) -> float:
        return min(self.left, _LOOK_INTERVAL)

    def ends(self, seen: object, now: float) -> bool:
        """Whether it is over. What is ``seen`` differs if something has moved since the last look; None: this time does
        not count."""
        passed, self._looked = now - self._looked, now
        if seen is None:
            return False
        if seen != self._seen:
            self._seen, self.left = seen, self._timeout
        else:
            self.left = max(0.0, self.left - passed)
        return self.left <= 0


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


@dataclass(frozen=True, slots=True)
class PreparedOffer:
    """``files``: how many changed, of the first version all. ``messages``: what to send now."""

    root: bytes
    files: int
    messages: tuple[Message, ...]


def _places(delta: Delta, tree: Directory) -> dict[bytes, tuple[bytes, int, int]]:
    return {piece.digest: (path, offset, piece.size) for path, offset, piece in transferred_pieces(delta, tree)}


class Sender:
    """The sender of one session. ``top``: the directory that trees are scanned from."""

    def __init__(self, top: str | os.PathLike[str]) -> None:
        self.bytes_sent = 0
        self._top = os.fsencode(os.path.abspath(top))
        self._versions: dict[bytes, Directory] = {}
        self._places: dict[bytes, dict[bytes, tuple[bytes, int, int]]] = {}

    @property
    def newest(self) -> Directory | None:
        """The version that was offered last."""
        return next(reversed(self._versions.values()), None)

    def offer(self, tree: Directory) -> PreparedOffer:
        """Offers ``tree``, as a delta from the version before it; no messages if it is the same."""
        root = tree.digest
        before = self.newest
        if before is not None and before.digest == root:
            return PreparedOffer(root, 0, ())
        delta = diff(before or EMPTY, tree)
        self._versions.pop(root, None)
        self._versions[root] = tree
        for old in list(self._versions)[:-_MAX_VERSIONS]:
            del self._versions[old]
            self._places.pop(old, None)
        data = encode(delta)
        if before is None and len(data) > _OFFER_BY_DIGEST:
            return PreparedOffer(root, tree.files, (self._count((SyncOffer(root=root.hex()), ())),))
        return PreparedOffer(root, len(delta.operations), self._offer_messages(tree, delta, data))

    def forget(self, root: bytes) -> None:
        """The version failed: ``offer`` sends it again."""
        self._versions.pop(root, None)
        self._places.pop(root, None)

    def _offer_messages(self, tree: Directory, delta: Delta, data: bytes) -> tuple[Message, ...]:
        pieces: list[tuple[bytes, bytes]] = []
        places = self._places[tree.digest] = _places(delta, tree)
        if transfer_size(delta) <= INLINE_LIMIT:
            read = {digest: self._read(digest, place) for digest, place in places.items()}
            # Files that changed after the scan are left out; when the engine requests them it gets SyncGone.
            pieces = [(digest, data) for digest, data in read.items() if data is not None]
        buffers = [compress(data)]
        size = 0
        if pieces:
            packed = pack(pieces)
            if len(packed) <= MAX_PACK:  # else the engine requests them
                size = len(packed)
                buffers.append(compress(packed))
        header = SyncOffer(root=tree.digest.hex(), delta_size=len(data), pack_size=size)
        return (self._count((header, tuple(buffers))),)

    def answer_need(self, header: SyncNeed) -> tuple[Message, ...]:
        """Offers the version again, as a delta from one that the engine has, or in full."""
        tree = self._versions.get(bytes.fromhex(header.root))
        if tree is None:
            return ()
        for held in header.held:
            root = bytes.fromhex(held)
            base = self._versions.get(root)
            if base is not None and base is not tree:
                delta = diff(base, tree)
                return self._offer_messages(tree, delta, encode(delta))
        delta = full_delta(tree)
        return self._offer_messages(tree, delta, encode(delta))

    def answer_wants(self, header: SyncWants, digests: bytes) -> Iterator[Message]:
        """Yields packs of about 2 MiB; ends with SyncGone if a file changed after the scan. Raises MalformedMessage.

        Threads read and compress the next packs while one is sent.
        """
        root = bytes.fromhex(header.root)
        tree = self._versions.get(root)
        if tree is None:
            yield self._count((SyncGone(root=header.root), ()))
            return
        wanted = split_digests(digests)
        places = self._places.get(root, {})
        if not places.keys() >= set(wanted):  # the engine lost others too, or has nothing
            places = self._places[root] = _places(full_delta(tree), tree)
        batches = _batches(wanted, places)
        for message in _prefetched(lambda batch: self._make_pack(header.root, batch, places), batches):
            yield self._count(message)
            if isinstance(message[0], SyncGone):
                return

    def _make_pack(self, root: str, batch: Sequence[bytes], places: _Places) -> Message:
        """A pack of these pieces, or SyncGone if a file changed after the scan."""
        pieces = []
        for digest in batch:
            place = places.get(digest)
            data = self._read(digest, place)
            if data is None:
                return SyncGone(root=root, path=readable(place[0]) if place else ""), ()
            pieces.append((digest, data))
        packed = pack(pieces)
        assert len(packed) <= MAX_PACK
        return SyncPieces(root=root, size=len(packed)), (compress(packed),)

    def _read(self, digest: bytes, place: tuple[bytes, int, int] | None) -> bytes | None:
        """The piece, or None if its file changed after the scan."""
        if place is None:
            return None
        path, offset, size = place
        try:
            with open(os.path.join(self._top, path), "rb") as file:
                file.seek(offset)
                data = file.read(size)
        except OSError:
            return None
        return data if piece_digest(data) == digest else None

    def _count(self, message: Message) -> Message:
        self.bytes_sent += sum(len(buffer) for buffer in message[1])
        return message


def _batches(digests: Iterable[bytes], places: _Places) -> Iterator[list[bytes]]:
    """Splits the digests into batches of about one pack each."""
    batch: list[bytes] = []
    size = 0
    for digest in digests:
        batch.append(digest)
        size += _PIECE_OVERHEAD + (places[digest][2] if digest in places else 0)
        if size >= _PACK:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _prefetched(step: Callable[[list[bytes]], Message], batches: Iterable[list[bytes]]) -> Iterator[Message]:
    """The results of ``step``, in order; threads work a few batches ahead of the consumer."""
    pending: deque[Future[Message]] = deque()
    with ThreadPoolExecutor(_PACK_THREADS, thread_name_prefix="meshgate-pack") as packers:
        for batch in batches:
            pending.append(packers.submit(step, batch))
            if len(pending) > _PACK_THREADS:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
