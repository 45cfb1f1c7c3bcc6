"""The one digest of the sync: BLAKE2b with 32 bytes, because every Python has it.

A host that holds nothing but torchmonarch must verify what it receives, so the digest has to come from the
standard library; BLAKE2b hashes above 1 GB/s on any CPU, with or without SHA instructions. ``person`` keeps
digests of content, of piece lists and of directories apart, so that no file can be made to look like another
file's list of pieces.
"""

from __future__ import annotations

from hashlib import blake2b

__all__ = ["DIGEST_SIZE", "NOTHING", "list_digest", "piece_digest", "short", "tree_digest"]

DIGEST_SIZE = 32
NOTHING = bytes(DIGEST_SIZE)
"""Names no version: the base of a delta that describes a whole tree."""


def piece_digest(data: bytes | bytearray | memoryview) -> bytes:
    return blake2b(data, digest_size=DIGEST_SIZE).digest()


def list_digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_SIZE, person=b"mg-list").digest()


def tree_digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_SIZE, person=b"mg-tree").digest()


def short(digest: bytes) -> str:
    """Enough of a digest for a person to tell versions apart."""
    return digest.hex()[:12]
