"""The client's side of an upload: makes offers of scanned trees, and packs of the pieces that the engine requests.

No I/O except reading those pieces. The caller sends the messages that it returns, in order, in the session's sync
stream.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from ..errors import readable
from ..tree.delta import INLINE_LIMIT, Delta, diff, encode, full_delta, transfer_size, transferred_pieces
from ..tree.tree import EMPTY, Directory, piece_digest
from .protocol import MAX_PACK, SyncGone, SyncNeed, SyncOffer, SyncPieces, SyncWants, compress, pack, split_digests

_PACK = 2 * 1024 * 1024
_PACK_THREADS = 2
_PIECE_OVERHEAD = 36
_OFFER_BY_DIGEST = 64 * 1024
_MAX_VERSIONS = 8

_Places = Mapping[bytes, tuple[bytes, int, int]]
"""The place of each piece by digest: path, offset, size."""

Message = tuple["SyncOffer | SyncPieces | SyncGone", tuple[bytes, ...]]
"""A header and its buffers."""


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
        if transfer_size(delta) <= INLINE_LIMIT:
            read = {digest: self._read(digest, place) for digest, place in _places(delta, tree).items()}
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
        places = self._places.get(root)
        if places is None:
            places = self._places[root] = _places(full_delta(tree), tree)
        batches = _batches(split_digests(digests), places)
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
