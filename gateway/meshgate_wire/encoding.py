"""Messages as the bytes of their stream, the counterpart of ``assembly``: nothing large is copied.

On its stream a message is: u32 length of the header, u32 number of buffers, a u64 length for each buffer, the
header, the buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

from .errors import MessageTooLarge
from .fragments import Sendable, flatten
from .frames import PeerLimits
from .limits import Limits
from .messages import Header, dump_header

__all__ = ["Encoded", "counts_and_lengths", "encode_message"]


class Encoded(NamedTuple):
    """``pieces``, one after the other, are the ``nbytes`` of the message."""

    nbytes: int
    pieces: list[bytes | memoryview]


@lru_cache(maxsize=64)
def counts_and_lengths(count: int) -> Struct:
    """The layout of what comes before the header of a message with ``count`` buffers."""
    return Struct(f"!II{count}Q")


def encode_message(header: Header, buffers: Sequence[Sendable], allowed: Limits | PeerLimits) -> Encoded:
    """Raises ``MessageTooLarge``, and ``ValueError`` for a header with text that is not Unicode."""
    head = dump_header(header)
    pieces: list[bytes | memoryview] = [b"", head]
    lengths: list[int] = []
    for buffer in buffers:
        if type(buffer) is bytes:
            pieces.append(buffer)
            lengths.append(len(buffer))
        else:
            size, parts = flatten(buffer)
            pieces += parts
            lengths.append(size)
    if len(head) > allowed.max_header:
        raise MessageTooLarge("a header in bytes", len(head), allowed.max_header)
    if len(lengths) > allowed.max_buffers:
        raise MessageTooLarge("a number of buffers", len(lengths), allowed.max_buffers)
    pieces[0] = preamble = counts_and_lengths(len(lengths)).pack(len(head), len(lengths), *lengths)
    nbytes = len(preamble) + len(head) + sum(lengths)
    if nbytes > allowed.max_message:
        raise MessageTooLarge("a size in bytes", nbytes, allowed.max_message)
    return Encoded(nbytes, pieces)
