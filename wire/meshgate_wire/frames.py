"""Encodes and decodes websocket messages. Stateless.

The first byte of a websocket message is its type (``docs/protocol.md`` has the tables):

- HELLO, the first message in each direction of a connection: JSON, so that any two versions can read each other's;
- FRAMES: an acknowledgement, the number of the first frame, then consecutively numbered frames;
- ACK: an acknowledgement only.

Before slicing, decoding checks every length against the data and every count against a limit.
"""

from __future__ import annotations

from struct import Struct
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .errors import LimitExceeded, ProtocolError
from .limits import KIB, MAX_WINDOW, MIN_LIMITS, Limits

HELLO: Final = 1
FRAMES: Final = 2
ACK: Final = 3

# The first byte of a frame: the flags of a DATA frame, or CREDIT.
FIRST: Final = 1
LAST: Final = 2
CREDIT: Final = 4

MAX_HELLO_BYTES: Final = 16 * 1024
MAX_SEQUENCE: Final = 2**63 - 1

_ACK = Struct("!BQ")
_FRAMES = Struct("!BQQ")
_FRAME = Struct("!BqI")
_CREDIT = Struct("!qI")

MESSAGE_HEADER_BYTES: Final = _FRAMES.size
FRAME_HEADER_BYTES: Final = _FRAME.size

encode_frame_header = _FRAME.pack  # (flags, stream, payload length)
read_frame_header = _FRAME.unpack_from  # the caller has checked that there are FRAME_HEADER_BYTES
encode_frames_header = _FRAMES.pack  # (FRAMES, acknowledgement, number of the first frame)
read_frames_header = _FRAMES.unpack_from  # the same; the caller has checked that there are MESSAGE_HEADER_BYTES


class PeerLimits(BaseModel):
    """The limits of the sender of a Hello on what it accepts."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    window: int = Field(ge=MIN_LIMITS["window"], le=MAX_WINDOW)
    max_websocket_message: int = Field(ge=MIN_LIMITS["max_websocket_message"], le=MAX_SEQUENCE)
    max_frame: int = Field(ge=MIN_LIMITS["max_frame"], le=MAX_SEQUENCE)
    max_header: int = Field(ge=MIN_LIMITS["max_header"], le=MAX_SEQUENCE)
    max_buffers: int = Field(ge=MIN_LIMITS["max_buffers"], le=MAX_SEQUENCE)
    max_message: int = Field(ge=MIN_LIMITS["max_message"], le=MAX_SEQUENCE)
    max_partial_messages: int = Field(ge=MIN_LIMITS["max_partial_messages"], le=MAX_SEQUENCE)
    max_partial_bytes: int = Field(ge=MIN_LIMITS["max_partial_bytes"], le=MAX_SEQUENCE)

    @model_validator(mode="after")
    def _check_consistency(self) -> PeerLimits:
        if self.max_websocket_message < self.max_frame + KIB or self.max_partial_bytes < self.max_message:
            raise ValueError(
                "max_websocket_message must exceed max_frame by 1 KiB, and max_partial_bytes be at least max_message"
            )
        return self

    @classmethod
    def of(cls, limits: Limits) -> PeerLimits:
        return cls(**{name: getattr(limits, name) for name in cls.model_fields})


class _HelloVersion(BaseModel):
    """The part of a Hello that every protocol version has."""

    protocol: Annotated[int, Field(ge=0, le=2**31)]
    role: Literal["client", "gateway"]
    software: Annotated[str, Field(max_length=64)]


class Hello(_HelloVersion):
    """The first message of a side on each connection. ``received``: the number of the last received frame."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    python: Annotated[str, Field(max_length=64)]
    monarch: Annotated[str, Field(max_length=64)] = ""  # version of torchmonarch, if it is installed
    received: Annotated[int, Field(ge=0, le=MAX_SEQUENCE)]
    limits: PeerLimits


def encode_hello(hello: Hello) -> bytes:
    return bytes((HELLO,)) + hello.model_dump_json().encode()


def decode_hello(data: bytes, *, protocol: int) -> Hello | tuple[int, str, str]:
    """The Hello in ``data``; if the peer has another version, its ``(protocol, software, role)``."""
    if len(data) > MAX_HELLO_BYTES:
        raise LimitExceeded("bytes in a hello", len(data), MAX_HELLO_BYTES, resumable=True)
    if data[:1] != bytes((HELLO,)):
        raise ProtocolError(
            f"the first message of a connection must be a hello (type {HELLO}), not type {data[:1].hex() or 'empty'}",
            resumable=True,
        )
    try:
        version = _HelloVersion.model_validate_json(data[1:])
        if version.protocol != protocol:
            return version.protocol, version.software, version.role
        return Hello.model_validate_json(data[1:])
    except ValidationError as error:
        raise ProtocolError(f"invalid hello: {describe(error)}", resumable=True) from error


def describe(error: ValidationError) -> str:
    """A validation error in one short line, without input of a length that the peer controls."""
    if error.error_count() > 64:
        return f"{error.error_count()} errors"
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(map(str, first["loc"]))[:100] or "value"
    return f"{where}: {first['msg'][:200]}"


def encode_ack(received: int) -> bytes:
    return _ACK.pack(ACK, received)


def read_ack(data: bytes) -> int:
    if len(data) != _ACK.size:
        raise ProtocolError(f"an acknowledgement must have {_ACK.size} bytes, not {len(data)}", resumable=True)
    ack: int = _ACK.unpack(data)[1]
    return ack


def encode_credits(grants: list[tuple[int, int]]) -> bytes:
    """A complete CREDIT frame of ``(stream, bytes)`` pairs."""
    payload = b"".join([_CREDIT.pack(stream, amount) for stream, amount in grants])
    return _FRAME.pack(CREDIT, 0, len(payload)) + payload


def grants_that_fit(nbytes: int) -> int:
    """The number of grants that fit into a CREDIT frame of ``nbytes``."""
    return max(0, nbytes - _FRAME.size) // _CREDIT.size


def decode_credits(payload: bytes) -> list[tuple[int, int]]:
    if not payload or len(payload) % _CREDIT.size:
        raise ProtocolError(
            f"a credit frame must consist of pairs of {_CREDIT.size} bytes, but has {len(payload)} bytes"
        )
    return list(_CREDIT.iter_unpack(payload))
