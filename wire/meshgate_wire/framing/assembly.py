"""Assembles messages from the payloads of frames. The counterpart is ``encoding``.

The lengths of a message come first, so everything is checked before memory is allocated. Every error here ends the
session, since the same frames would be replayed on the next connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from pydantic import ValidationError

from ..errors import LimitExceeded, ProtocolError
from ..limits import MIN_CHUNK, Limits
from ..messages import Header
from .encoding import preamble_layout
from .fragments import Fragments
from .frames import FIRST, LAST, describe
from .header_codec import load_header

Refuse: TypeAlias = "Callable[[int, int], str]"
"""Called with the size of a message and the sizes of other incomplete ones. Returns why its buffers must be dropped,
or an empty string."""

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
