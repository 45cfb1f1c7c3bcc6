"""The laptop's end: turns a scanned tree into an offer, and wants into packs of pieces.

No I/O but reading the files that the engine lacks; whoever drives it sends what it returns, in order, in the
session's sync stream.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from .compress import squeeze
from .delta import Delta, brings, brought, diff, encode, whole
from .digest import piece_digest
from .protocol import MAX_PACK, SyncGone, SyncNeed, SyncOffer, SyncPieces, SyncWants, pack, split_digests
from .tree import EMPTY, Directory

__all__ = ["Message", "Offered", "Sender"]

INLINE = 2 * 1024 * 1024
_PACK = 2 * 1024 * 1024
_PACKERS = 2
_PIECE_OVERHEAD = 36
_PROBE_FIRST = 64 * 1024
_REMEMBERED = 8

_Places = Mapping[bytes, tuple[bytes, int, int]]
"""Where each piece is: path, offset, size."""

Message = tuple["SyncOffer | SyncPieces | SyncGone", tuple[bytes, ...]]
"""A header and its buffers."""


@dataclass(frozen=True, slots=True)
class Offered:
    """A version on its way: how it differs from the one before, and what to send now."""

    root: bytes
    files: int
    messages: tuple[Message, ...]


def _places(delta: Delta, tree: Directory) -> dict[bytes, tuple[bytes, int, int]]:
    return {piece.digest: (path, offset, piece.size) for path, offset, piece in brought(delta, tree)}


class Sender:
    """One session's. ``top`` is the directory that trees are scanned from. ``remembered`` are versions that the gateway
    held at the end of an earlier session, and may hold still."""

    def __init__(self, top: str | os.PathLike[str], remembered: Iterable[Directory] = ()) -> None:
        self.bytes_sent = 0
        self._top = os.fsencode(os.path.abspath(top))
        self._versions: dict[bytes, Directory] = {}
        self._remembered = {tree.digest: tree for tree in remembered}
        self._places: dict[bytes, dict[bytes, tuple[bytes, int, int]]] = {}

    @property
    def newest(self) -> Directory | None:
        """The version offered last."""
        return next(reversed(self._versions.values()), None)

    def offer(self, tree: Directory) -> Offered:
        """Offers ``tree``, against the version offered before; nothing is sent when it is the same."""
        root = tree.digest
        before = self.newest
        if before is not None and before.digest == root:
            return Offered(root, 0, ())
        delta = diff(before or EMPTY, tree)
        self._versions.pop(root, None)
        self._versions[root] = tree
        for old in list(self._versions)[:-_REMEMBERED]:
            del self._versions[old]
            self._places.pop(old, None)
        data = encode(delta)
        if before is None and len(data) > _PROBE_FIRST:
            return Offered(root, tree.files, (self._count((SyncOffer(root=root.hex()), ())),))
        return Offered(root, len(delta.operations), self._described(tree, delta, data))

    def forget(self, root: bytes) -> None:
        """The version did not get through: it is offered again when it is met again."""
        self._versions.pop(root, None)
        self._places.pop(root, None)

    def _described(self, tree: Directory, delta: Delta, data: bytes) -> tuple[Message, ...]:
        pieces: list[tuple[bytes, bytes]] = []
        if brings(delta) <= INLINE:
            read = {digest: self._read(digest, place) for digest, place in _places(delta, tree).items()}
            # What has changed since is asked for later, and told gone then.
            pieces = [(digest, data) for digest, data in read.items() if data is not None]
        buffers = [squeeze(data)]
        size = 0
        if pieces:
            packed = pack(pieces)
            if len(packed) <= MAX_PACK:  # else they are too many, and asked for
                size = len(packed)
                buffers.append(squeeze(packed))
        header = SyncOffer(root=tree.digest.hex(), delta_size=len(data), pack_size=size)
        return (self._count((header, tuple(buffers))),)

    def needed(self, header: SyncNeed) -> tuple[Message, ...]:
        """Answers SyncNeed: tells the version against one the engine holds, or whole."""
        tree = self._versions.get(bytes.fromhex(header.root))
        if tree is None:
            return ()
        for held in header.held:
            root = bytes.fromhex(held)
            base = self._versions.get(root) or self._remembered.get(root)
            if base is not None and base is not tree:
                delta = diff(base, tree)
                return self._described(tree, delta, encode(delta))
        delta = whole(tree)
        return self._described(tree, delta, encode(delta))

    def wanted(self, header: SyncWants, digests: bytes) -> Iterator[Message]:
        """Answers SyncWants, reading as it goes: packs of about 2 MiB, ending with SyncGone where a file is no longer
        what was scanned. Raises MalformedMessage.

        The next packs are read and compressed by threads while one is sent.
        """
        root = bytes.fromhex(header.root)
        tree = self._versions.get(root)
        if tree is None:
            yield self._count((SyncGone(root=header.root), ()))
            return
        places = self._places.get(root)
        if places is None:
            places = self._places[root] = _places(whole(tree), tree)
        batches = _batches(split_digests(digests), places)
        for message in _ahead(lambda batch: self._packed(header.root, batch, places), batches):
            yield self._count(message)
            if isinstance(message[0], SyncGone):
                return

    def _packed(self, root: str, batch: Sequence[bytes], places: _Places) -> Message:
        """These pieces; or that a file is no longer what was scanned."""
        pieces = []
        for digest in batch:
            place = places.get(digest)
            data = self._read(digest, place)
            if data is None:
                return SyncGone(root=root, path=os.fsdecode(place[0]) if place else ""), ()
            pieces.append((digest, data))
        packed = pack(pieces)
        assert len(packed) <= MAX_PACK
        return SyncPieces(root=root, size=len(packed)), (squeeze(packed),)

    def _read(self, digest: bytes, place: tuple[bytes, int, int] | None) -> bytes | None:
        """The piece, if the file is still what was scanned."""
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
    """Pieces that make up a pack each."""
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


def _ahead(step: Callable[[list[bytes]], Message], batches: Iterable[list[bytes]]) -> Iterator[Message]:
    """The outcome of ``step`` for each, in order: threads are a few ahead of who takes them."""
    begun: deque[Future[Message]] = deque()
    with ThreadPoolExecutor(_PACKERS, thread_name_prefix="meshgate-pack") as packers:
        for batch in batches:
            begun.append(packers.submit(step, batch))
            if len(begun) > _PACKERS:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
