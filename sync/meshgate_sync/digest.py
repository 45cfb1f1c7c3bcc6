"""The digests of the sync: SHA-256 of contents, BLAKE2b of lists and directories, for every Python has both.

A host that holds nothing but torchmonarch must verify what it receives, so digests have to come from the standard
library. Every byte that travels is hashed once in each process, which is half of what a host does for a first sync:
with the SHA instructions that processors have by now SHA-256 takes half as long as BLAKE2b, without them twice as
long. Lists and directories have a function of their own, with ``person`` to keep the two apart, so that no file can
be made to look like another file's list of pieces.
"""

from __future__ import annotations

from hashlib import blake2b, sha256

__all__ = ["DIGEST_SIZE", "NOTHING", "list_digest", "piece_digest", "short", "tree_digest"]

DIGEST_SIZE = 32
NOTHING = bytes(DIGEST_SIZE)
"""Names no version: the base of a delta that describes a whole tree."""


def piece_digest(data: bytes | bytearray | memoryview) -> bytes:
    return sha256(data).digest()


def list_digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_SIZE, person=b"mg-list").digest()


def tree_digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_SIZE, person=b"mg-tree").digest()


def short(digest: bytes) -> str:
    """Enough of a digest for a person to tell versions apart."""
    return digest.hex()[:12]
