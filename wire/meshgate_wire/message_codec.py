"""A message as bytes, and back: encoded without copying large buffers, assembled from the payloads of frames.

A message consists of a preamble (u32 length of the header, u32 number of buffers, a u64 length for each buffer), the
header as JSON, and the buffers. The lengths come first, so everything is checked before memory is allocated. Every
error of the receiving half ends the session, since the same frames would be replayed on the next connection.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from struct import Struct
from typing import NamedTuple, TypeAlias, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from .errors import LimitExceeded, MessageTooLarge, ProtocolError
from .fragments import Fragments, Sendable, flatten
from .frames import FIRST, LAST, PeerLimits, describe
from .limits import MIN_CHUNK, Limits
from .messages import MAX_COUNT, Header

_ADAPTER: TypeAdapter[Header] = TypeAdapter(Header)
_parse: Callable[[bytes], Header] = _ADAPTER.validator.validate_json
_CALL_NUMBER = re.compile(rb'\{"type":"[a-z_]{1,32}","call":(0|[1-9][0-9]{0,15})(?=[,}])')
_CACHED_HEADERS = 512
_CACHED_HEADER_BYTES = 1024
_cache: dict[bytes, Header] = {}  # by the JSON without the call number
_set = object.__setattr__  # bypasses that the models are frozen
H = TypeVar("H", bound=BaseModel)

Refuse: TypeAlias = "Callable[[int, int], str]"
"""Called with the size of a message and the sizes of other incomplete ones. Returns why its buffers must be dropped,
or an empty string."""


# --- headers ------------------------------------------------------------------------------------------------


def dump_header(header: Header) -> bytes:
    """The JSON of ``header``. Raises ``ValueError`` for text that UTF-8 cannot encode (lone surrogates)."""
    return header.__pydantic_serializer__.to_json(header)  # takes a third of the time of the union's serializer


def load_header(data: bytes | memoryview) -> Header:
    """Parses a header. Raises ``pydantic.ValidationError`` if ``data`` is not a valid one."""
    if not isinstance(data, bytes):
        data = bytes(data)
    match = _CALL_NUMBER.match(data)
    if match is None or (call := int(match[1])) > MAX_COUNT:
        return _parse(data)
    # Calls of an endpoint differ in the number only, and so do their replies: the rest is parsed once.
    rest = data[: match.start(1)] + data[match.end(1) :]
    cached = _cache.get(rest)
    if cached is not None:
        return with_call_number(cached, call)
    header = _parse(data)
    if len(rest) <= _CACHED_HEADER_BYTES and not getattr(header, "trace", None):  # no two traces are equal
        if len(_cache) >= _CACHED_HEADERS:
            _cache.clear()
        _cache[rest] = header
    return header


def with_call_number(header: H, call: int) -> H:
    """A copy of ``header`` with another call number, made without validation."""
    new = object.__new__(type(header))
    _set(new, "__dict__", {**header.__dict__, "call": call})
    _set(new, "__pydantic_fields_set__", header.__pydantic_fields_set__)
    _set(new, "__pydantic_extra__", None)
    _set(new, "__pydantic_private__", None)
    return new


# --- sending ------------------------------------------------------------------------------------------------


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


# --- receiving ----------------------------------------------------------------------------------------------


_COUNTS = preamble_layout(0)


class AssembledMessage(NamedTuple):
    """A complete message of a stream."""

    header: Header
    buffers: tuple[Fragments, ...]
    nbytes: int
    refused: str = ""  # why it has no buffers


def accept_all(nbytes: int, incomplete: int) -> str:
    return ""


def _invalid_header(stream: int, error: ValidationError) -> ProtocolError:
    return ProtocolError(f"invalid header of a message on stream {stream}: {describe(error)}")


def _check_counts(limits: Limits, header_bytes: int, count: int) -> None:
    if header_bytes > limits.max_header:
        raise LimitExceeded("header bytes in one message", header_bytes, limits.max_header)
    if count > limits.max_buffers:
        raise LimitExceeded("buffers in one message", count, limits.max_buffers)


def _decode_message(stream: int, data: bytes, start: int, end: int, limits: Limits) -> AssembledMessage:
    """Decodes the message in ``data[start:end]``."""
    nbytes = end - start
    if nbytes < _COUNTS.size:
        raise ProtocolError(f"a message on stream {stream} has only {nbytes} bytes, less than its preamble")
    if nbytes > limits.max_message:
        raise LimitExceeded("bytes in one message", nbytes, limits.max_message)
    header_bytes, count = _COUNTS.unpack_from(data, start)
    if header_bytes > limits.max_header or count > limits.max_buffers:
        _check_counts(limits, header_bytes, count)
    head = start + _COUNTS.size + 8 * count
    at = head + header_bytes
    if at > end:
        raise ProtocolError(f"a message on stream {stream} announces at least {at - start} bytes but has {nbytes}")
    lengths = preamble_layout(count).unpack_from(data, start)[2:] if count else ()
    if at + sum(lengths) != end:
        raise ProtocolError(
            f"a message on stream {stream} announces {at - start + sum(lengths)} bytes but has {nbytes}"
        )
    try:
        header = load_header(data[head:at])
    except ValidationError as error:
        raise _invalid_header(stream, error) from error
    buffers = []
    for length in lengths:
        buffers.append(Fragments((data[at : at + length],) if length else (), length))
        at += length
    return AssembledMessage(header, tuple(buffers), nbytes)


class _Partial:
    """A message of which some frames have been received."""

    __slots__ = (
        "_buffers", "_fragments", "_header", "_lengths", "_limits", "_missing", "_preamble", "_step", "_views",
        "_wanted", "announced", "received", "refused", "stream",
    )  # fmt: skip

    def __init__(self, stream: int, limits: Limits, views: bool) -> None:
        self.stream = stream
        self._views = views
        self.received = 0
        self.announced = 0  # the size of the message, once known
        self.refused = ""  # why its buffers are dropped
        self._limits = limits
        self._preamble = bytearray()  # counts, lengths and header, as far as received
        self._step = _Partial._read_counts  # a bound method would make a reference cycle
        self._wanted = _COUNTS.size  # the size of _preamble at which _step can run
        self._header: Header | None = None
        self._lengths: tuple[int, ...] = ()
        self._buffers: list[Fragments] = []
        self._fragments: list[bytes | memoryview] = []  # of the current buffer
        self._missing = 0  # of the current buffer

    def feed(self, data: bytes, start: int, end: int) -> None:
        """Adds ``data[start:end]``, the next bytes of the message."""
        self.received += end - start
        while self._header is None:
            part = data[start : min(end, start + self._wanted - len(self._preamble))]
            self._preamble += part
            start += len(part)
            if len(self._preamble) < self._wanted:
                return
            self._step(self)
        # A view keeps all of ``data`` alive, which is worth it only if most of it is this message.
        source = memoryview(data) if self._views and 2 * (end - start) > len(data) else data
        while start < end:
            if not self._missing:
                raise ProtocolError(
                    f"a message on stream {self.stream} announces {self.announced} bytes "
                    f"but has at least {self.received}"
                )
            fragment = source[start : min(end, start + self._missing)]
            if not self.refused:
                self._fragments.append(fragment)
            start += len(fragment)
            self._missing -= len(fragment)
            if not self._missing:
                self._close_buffer()

    def finish(self) -> AssembledMessage:
        if self._header is None or len(self._buffers) < len(self._lengths):
            raise ProtocolError(
                f"a message on stream {self.stream} ended after {self.received} of {self.announced or 'unknown'} bytes"
            )
        buffers = () if self.refused else tuple(self._buffers)
        return AssembledMessage(self._header, buffers, self.received, self.refused)

    def _read_counts(self) -> None:
        header_bytes, count = _COUNTS.unpack(self._preamble)
        _check_counts(self._limits, header_bytes, count)
        self._wanted += 8 * count
        self._step = _Partial._read_lengths

    def _read_lengths(self) -> None:
        count = (self._wanted - _COUNTS.size) // 8
        header_bytes, _, *lengths = preamble_layout(count).unpack(self._preamble)
        announced = self._wanted + header_bytes + sum(lengths)
        if announced > self._limits.max_message:
            raise LimitExceeded("bytes in one message", announced, self._limits.max_message)
        self.announced = announced
        self._lengths = tuple(lengths)
        self._wanted += header_bytes
        self._step = _Partial._read_header

    def _read_header(self) -> None:
        try:
            self._header = load_header(bytes(self._preamble[_COUNTS.size + 8 * len(self._lengths) :]))
        except ValidationError as error:
            raise _invalid_header(self.stream, error) from error
        self._preamble = bytearray()
        self._open_buffer()

    def _open_buffer(self) -> None:
        while len(self._buffers) < len(self._lengths):
            self._missing = self._lengths[len(self._buffers)]
            if self._missing:
                return
            self._buffers.append(Fragments())

    def _close_buffer(self) -> None:
        self._buffers.append(Fragments(tuple(self._fragments), self._lengths[len(self._buffers)]))
        self._fragments = []
        self._open_buffer()


class Assembly:
    """The messages being received, at most one per stream.

    With ``views``, their large buffers are views of the received data instead of copies as ``bytes``. ``refuse``
    decides on each message of several frames once its size is known.
    """

    __slots__ = ("_limits", "_partials", "_refuse", "_views", "announced")

    def __init__(self, limits: Limits, *, views: bool = False, refuse: Refuse = accept_all) -> None:
        self._limits = limits
        self._views = views
        self._refuse = refuse
        self._partials: dict[int, _Partial] = {}
        self.announced = 0  # the known sizes of all partial messages

    def __len__(self) -> int:
        return len(self._partials)

    @property
    def nbytes(self) -> int:
        """The received bytes of incomplete messages."""
        return sum(partial.received for partial in self._partials.values())

    def missing(self, stream: int) -> int:
        """What has not arrived of a stream's incomplete message; 0 until its lengths have arrived."""
        partial = self._partials[stream]
        return max(0, partial.announced - partial.received)

    def receive(self, flags: int, stream: int, data: bytes, start: int, end: int) -> AssembledMessage | None:
        """Adds the payload ``data[start:end]`` of a frame. Returns the message that it completes, if any."""
        partial = self._partials.get(stream) if self._partials else None
        if flags & FIRST:
            if partial is not None:
                raise ProtocolError(f"a message starts on stream {stream} before the previous one has ended")
            if flags & LAST:
                return _decode_message(stream, data, start, end, self._limits)
            partial = self._start(stream)
        elif partial is None:
            raise ProtocolError(f"a frame on stream {stream} continues a message that has not started")
        if not flags & LAST and end - start < MIN_CHUNK:
            raise ProtocolError(
                f"a frame on stream {stream} has {end - start} bytes; "
                f"all but the last of a message must have at least {MIN_CHUNK}"
            )
        self._feed(partial, data, start, end)
        if not flags & LAST:
            return None
        del self._partials[stream]
        self.announced -= partial.announced
        return partial.finish()

    def _start(self, stream: int) -> _Partial:
        if len(self._partials) >= self._limits.max_partial_messages:
            raise LimitExceeded("incomplete messages", len(self._partials) + 1, self._limits.max_partial_messages)
        partial = self._partials[stream] = _Partial(stream, self._limits, self._views)
        return partial

    def _feed(self, partial: _Partial, data: bytes, start: int, end: int) -> None:
        before = partial.announced
        partial.feed(data, start, end)
        self.announced += partial.announced - before
        if self.announced > self._limits.max_partial_bytes:
            raise LimitExceeded("bytes of incomplete messages", self.announced, self._limits.max_partial_bytes)
        if partial.announced != before:
            kept = sum(each.announced for each in self._partials.values() if not each.refused)
            partial.refused = self._refuse(partial.announced, kept - partial.announced)

    def validate_state(self) -> None:
        assert self.announced == sum(partial.announced for partial in self._partials.values())
        assert len(self._partials) <= self._limits.max_partial_messages
        assert all(not p.announced or p.received <= p.announced for p in self._partials.values())
