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
_TYPES = (Hello, Offer, RequestFullDelta, Want, Cancel, Data, Ack, Withdraw, Heartbeat, Hold, Unreachable)
_DATA = _TYPES.index(Data)
_DATA_HEAD = 1 + DIGEST_SIZE


def encode_frame(message: Message) -> tuple[bytes, ...]:
    """The frame in parts, so that a piece is not copied."""
    kind = bytes((_TYPES.index(type(message)),))
    if isinstance(message, Data):
        head = (_DATA_HEAD + len(message.data)).to_bytes(4, "big") + kind + message.digest
        return head, message.data
    out = Writer()
    _write(out, message)
    body = out.finish()
    return ((1 + len(body)).to_bytes(4, "big") + kind + body,)


def _write(out: Writer, message: Message) -> None:
    if isinstance(message, Hello):
        out.short(message.name.encode())
        _write_digests(out, message.roots)
    elif isinstance(message, Offer):
        for digest in (message.root, message.base, message.replaces):
            out.digest(digest)
        out.u8(message.striped)
        out.long(message.delta)
        out.u32(len(message.inline))
        for digest, data in message.inline:
            out.digest(digest)
            out.long(data)
        out.u32(message.serial)
        _write_digests(out, message.live)
    elif isinstance(message, RequestFullDelta | Withdraw | Hold):
        out.digest(message.root)
    elif isinstance(message, Want):
        out.digest(message.root)
        _write_digests(out, message.digests)
    elif isinstance(message, Cancel):
        _write_digests(out, message.digests)
    elif isinstance(message, Ack):
        out.digest(message.root)
        out.u32(len(message.ready))
        for name in message.ready:
            out.short(name.encode())
        _write_reasons(out, message.failed)
    elif isinstance(message, Unreachable):
        _write_reasons(out, message.hosts)
    elif isinstance(message, Heartbeat):
        out.u8(message.starved)


def _write_reasons(out: Writer, reasons: tuple[tuple[str, str], ...]) -> None:
    out.u32(len(reasons))
    for name, reason in reasons:
        out.short(name.encode())
        out.short(reason.encode()[:_MAX_REASON])


def _write_digests(out: Writer, digests: tuple[bytes, ...]) -> None:
    out.u32(len(digests))
    out.raw(b"".join(digests))


def decode_frame(frame: bytes | memoryview) -> Message:
    """The message in a frame, its length prefix removed. Raises MalformedMessage."""
    if len(frame) > _DATA_HEAD and frame[0] == _DATA:  # most frames; copied once
        return Data(bytes(frame[1:_DATA_HEAD]), _piece(bytes(frame[_DATA_HEAD:])))
    reader = Reader(bytes(frame))
    kind = reader.u8()
    if kind >= len(_TYPES):
        raise MalformedMessage(f"unknown frame type {kind}: the peer may run another version of meshgate")
    try:
        message = _READERS[_TYPES[kind]](reader)
    except UnicodeDecodeError as error:
        raise MalformedMessage(f"{_TYPES[kind].__name__} frame: a host name is not UTF-8") from error
    reader.finish()
    return message


def _read_offer(reader: Reader) -> Offer:
    root, base, replaces = reader.digest(), reader.digest(), reader.digest()
    striped, delta = reader.u8() != 0, reader.long()
    count = reader.count(DIGEST_SIZE + 4)
    inline = tuple([(reader.digest(), _piece(reader.long())) for _ in range(count)])
    return Offer(root, base, replaces, striped, delta, inline, reader.u32(), _digests(reader))


def _read_ack(reader: Reader) -> Ack:
    root = reader.digest()
    ready = tuple([_name(reader) for _ in range(reader.count(2))])
    return Ack(root, ready, _reasons(reader))


def _reasons(reader: Reader) -> tuple[tuple[str, str], ...]:
    return tuple([(_name(reader), reader.short().decode(errors="replace")) for _ in range(reader.count(4))])


def _digests(reader: Reader) -> tuple[bytes, ...]:
    data = reader.take(reader.count(DIGEST_SIZE) * DIGEST_SIZE)
    return tuple([data[start : start + DIGEST_SIZE] for start in range(0, len(data), DIGEST_SIZE)])


def _piece(data: bytes) -> bytes:
    if not 0 < len(data) <= MAX_PIECE:
        raise MalformedMessage(f"invalid piece size: {len(data)} bytes (1 to {MAX_PIECE} allowed)")
    return data


def _name(reader: Reader) -> str:
    name = reader.short()
    if not name or len(name) > _MAX_NAME:
        raise MalformedMessage(f"invalid host name length: {len(name)} bytes (1 to {_MAX_NAME} allowed)")
    return name.decode()


_READERS: dict[type, Callable[[Reader], Message]] = {
    Hello: lambda reader: Hello(_name(reader), _digests(reader)),
    Offer: _read_offer,
    RequestFullDelta: lambda reader: RequestFullDelta(reader.digest()),
    Want: lambda reader: Want(reader.digest(), _digests(reader)),
    Cancel: lambda reader: Cancel(_digests(reader)),
    Data: lambda reader: Data(reader.digest(), _piece(reader.take(reader.remaining))),
    Ack: _read_ack,
    Withdraw: lambda reader: Withdraw(reader.digest()),
    Hold: lambda reader: Hold(reader.digest()),
    Unreachable: lambda reader: Unreachable(_reasons(reader)),
    Heartbeat: lambda reader: Heartbeat(reader.u8() != 0),
}
