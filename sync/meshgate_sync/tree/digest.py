"""The digests of the sync: SHA-256 of contents, BLAKE2b of lists of pieces and of directories.

A host that has nothing but torchmonarch must verify what it receives, so both come from the standard library. Every
byte that travels is hashed once in each process, which is half the work of a host in a first sync: with the SHA
instructions of current processors SHA-256 takes half as long as BLAKE2b, without them twice as long. Lists and
directories have a function of their own, distinguished by ``person``, so that no file can be made to look like another
file's list of pieces.
"""

from __future__ import annotations

from hashlib import blake2b, sha256

DIGEST_SIZE = 32
NOTHING = bytes(DIGEST_SIZE)
"""The digest of no version: the base of a full delta."""


def piece_digest(data: bytes | bytearray | memoryview) -> bytes:
    return sha256(data).digest()


def list_digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_SIZE, person=b"mg-list").digest()


def tree_digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_SIZE, person=b"mg-tree").digest()


def short(digest: bytes) -> str:
    """The first 12 hex digits, for messages and logs."""
    return digest.hex()[:12]
