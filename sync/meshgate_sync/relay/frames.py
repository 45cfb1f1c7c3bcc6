"""What relays send to each other, and how it is encoded.

The child opens the connection; the parent is nearer to the gateway::

    child  -> parent   Hello             on the control connection: my name and the versions I hold
    parent -> child    Offer             a version, as a delta; small ones with the pieces they add
    child  -> parent   RequestFullDelta  I do not have the base
    child  -> parent   Want              send these pieces, in this order, as soon as you have them
    child  -> parent   Cancel            I no longer need these pieces from you
    parent -> child    Data              a piece
    child  -> parent   Ack               hosts that are ready to run a version, and hosts that cannot get it
    child  -> parent   Unreachable       parents that hosts cannot reach, and why
    parent -> child    Withdraw          a version is no longer needed
    parent -> child    Hold              processes are about to be started from a version: keep it unchanged
    parent -> child    Heartbeat         nothing else to send; ``starved``: I wait for pieces myself

A frame is a length (4 bytes), a type (1 byte) and a body, at most MAX_FRAME bytes.

Imports nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ..errors import MalformedMessage
from ..tree.codec import Reader, Writer
from ..tree.tree import DIGEST_SIZE, MAX_PIECE

MAX_FRAME = 128 * 1024 * 1024
_MAX_NAME = 1024
_MAX_REASON = 4096


@dataclass(frozen=True, slots=True)
class Hello:
    name: str
    roots: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Offer:
    """``delta`` (see ``delta.encode``) leads from ``base`` to ``root``. ``replaces`` is a version that no process was
    or will be started from, or NOTHING. ``striped``: request each piece along its stripe. ``inline``: pieces that
    come with the offer, as (digest, data). ``serial`` numbers the offers of a gateway; of the versions offered before
    this one only those in ``live`` are still needed, even if this host missed a Withdraw."""

    root: bytes
    base: bytes
    replaces: bytes
    striped: bool
    delta: bytes
    inline: tuple[tuple[bytes, bytes], ...] = ()
    serial: int = 0
    live: tuple[bytes, ...] = ()

    def without_pieces(self) -> Offer:
        return replace(self, inline=())


@dataclass(frozen=True, slots=True)
class RequestFullDelta:
    root: bytes


@dataclass(frozen=True, slots=True)
class Want:
    root: bytes
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Data:
    digest: bytes
    data: bytes


@dataclass(frozen=True, slots=True)
class Ack:
    """``failed``: (host, reason). For each host the latest Ack counts."""

    root: bytes
    ready: tuple[str, ...]
    failed: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Unreachable:
    """``hosts``: (host, what it cannot reach and why), or (host, "") if it can again."""

    hosts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Withdraw:
    root: bytes


@dataclass(frozen=True, slots=True)
class Hold:
    root: bytes


@dataclass(frozen=True, slots=True)
class Heartbeat:
    starved: bool


Message = Hello | Offer | RequestFullDelta | Want | Cancel | Data | Ack | Withdraw | Heartbeat | Hold | Unreachable
_Field: TypeAlias = tuple[Callable[[Writer, Any], None], Callable[[Reader], Any]]


def _write_digests(out: Writer, digests: tuple[bytes, ...]) -> None:
    out.u32(len(digests))
    out.raw(b"".join(digests))


def _read_digests(reader: Reader) -> tuple[bytes, ...]:
    data = reader.take(reader.count(DIGEST_SIZE) * DIGEST_SIZE)
    return tuple([data[start : start + DIGEST_SIZE] for start in range(0, len(data), DIGEST_SIZE)])


def _piece(data: bytes) -> bytes:
    if not 0 < len(data) <= MAX_PIECE:
        raise MalformedMessage(f"invalid piece size: {len(data)} bytes (1 to {MAX_PIECE} allowed)")
    return data


def _read_name(reader: Reader) -> str:
    name = reader.short()
    if not name or len(name) > _MAX_NAME:
        raise MalformedMessage(f"invalid host name length: {len(name)} bytes (1 to {_MAX_NAME} allowed)")
    return name.decode()


def _pair(first: _Field, second: _Field) -> _Field:
    def write(out: Writer, pair: tuple[Any, Any]) -> None:
        first[0](out, pair[0])
        second[0](out, pair[1])

    return write, lambda reader: (first[1](reader), second[1](reader))


def _many(field: _Field, size: int) -> _Field:
    """``size``: the bytes that an item takes at least."""

    def write(out: Writer, items: tuple[Any, ...]) -> None:
        out.u32(len(items))
        for item in items:
            field[0](out, item)

    return write, lambda reader: tuple([field[1](reader) for _ in range(reader.count(size))])


_DIGEST: _Field = Writer.digest, Reader.digest
_DIGESTS: _Field = _write_digests, _read_digests
_FLAG: _Field = Writer.u8, lambda reader: reader.u8() != 0
_NAME: _Field = lambda out, name: out.short(name.encode()), _read_name
_REASON: _Field = (
    lambda out, reason: out.short(reason.encode()[:_MAX_REASON]),
    lambda reader: reader.short().decode(errors="replace"),
)
_REASONS = _many(_pair(_NAME, _REASON), 4)
_PIECES = _many(_pair(_DIGEST, (Writer.long, lambda reader: _piece(reader.long()))), DIGEST_SIZE + 4)
_NUMBER: _Field = Writer.u32, Reader.u32

# The fields of each type, in the order of the class. The types are numbered in this order.
_FIELDS: dict[type[Message], tuple[_Field, ...]] = {
    Hello: (_NAME, _DIGESTS),
    Offer: (_DIGEST, _DIGEST, _DIGEST, _FLAG, (Writer.long, Reader.long), _PIECES, _NUMBER, _DIGESTS),
    RequestFullDelta: (_DIGEST,),
    Want: (_DIGEST, _DIGESTS),
    Cancel: (_DIGESTS,),
    Data: (_DIGEST, (Writer.raw, lambda reader: _piece(reader.take(reader.remaining)))),
    Ack: (_DIGEST, _many(_NAME, 2), _REASONS),
    Withdraw: (_DIGEST,),
    Heartbeat: (_FLAG,),
    Hold: (_DIGEST,),
    Unreachable: (_REASONS,),
}
_TYPES = tuple(_FIELDS)
_DATA = _TYPES.index(Data)
_DATA_HEAD = 1 + DIGEST_SIZE


def encode_frame(message: Message) -> tuple[bytes, ...]:
    """The frame in parts, so that a piece is not copied."""
    kind = bytes((_TYPES.index(type(message)),))
    if isinstance(message, Data):
        head = (_DATA_HEAD + len(message.data)).to_bytes(4, "big") + kind + message.digest
        return head, message.data
    out = Writer()
    for (write, _), name in zip(_FIELDS[type(message)], message.__slots__, strict=True):
        write(out, getattr(message, name))
    body = out.finish()
    return ((1 + len(body)).to_bytes(4, "big") + kind + body,)


def decode_frame(frame: bytes | memoryview) -> Message:
    """The message in a frame, its length prefix removed. Raises MalformedMessage."""
    if len(frame) > _DATA_HEAD and frame[0] == _DATA:  # most frames; copied once
        return Data(bytes(frame[1:_DATA_HEAD]), _piece(bytes(frame[_DATA_HEAD:])))
    reader = Reader(bytes(frame))
    kind = reader.u8()
    if kind >= len(_TYPES):
        raise MalformedMessage(f"unknown frame type {kind}: the peer may run another version of meshgate")
    Type = _TYPES[kind]
    try:
        message = Type(*(read(reader) for _, read in _FIELDS[Type]))
    except UnicodeDecodeError as error:
        raise MalformedMessage(f"{Type.__name__} frame: a host name is not UTF-8") from error
    reader.finish()
    return message
