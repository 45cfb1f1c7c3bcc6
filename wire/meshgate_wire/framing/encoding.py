"""Encodes messages without copying large buffers. The counterpart is ``assembly``.

A message consists of a preamble (u32 length of the header, u32 number of buffers, a u64 length for each buffer), the
header and the buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

from ..errors import MessageTooLarge
from ..limits import Limits
from ..messages import Header
from .fragments import Sendable, flatten
from .frames import PeerLimits
from .header_codec import dump_header


class Encoded(NamedTuple):
    """The ``nbytes`` of a message, as consecutive ``pieces``."""

    nbytes: int
    pieces: list[bytes | memoryview]


@lru_cache(maxsize=64)
def preamble_layout(count: int) -> Struct:
    """The layout of the preamble of a message with ``count`` buffers."""
    return Struct(f"!II{count}Q")


def encode_message(header: Header, buffers: Sequence[Sendable], allowed: Limits | PeerLimits) -> Encoded:
    """Raises ``MessageTooLarge``, or ``ValueError`` for a header with text that UTF-8 cannot encode."""
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
        raise MessageTooLarge("header bytes", len(head), allowed.max_header)
    if len(lengths) > allowed.max_buffers:
        raise MessageTooLarge("buffers", len(lengths), allowed.max_buffers)
    pieces[0] = preamble = preamble_layout(len(lengths)).pack(len(head), len(lengths), *lengths)
    nbytes = len(preamble) + len(head) + sum(lengths)
    if nbytes > allowed.max_message:
        raise MessageTooLarge("bytes", nbytes, allowed.max_message)
    return Encoded(nbytes, pieces)
