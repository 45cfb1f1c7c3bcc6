"""The receiving side of flow control: how much the peer may send on each stream, and when it may send more.

The peer may have ``window`` bytes in flight per stream. Bytes are granted again when they arrive, except those of
complete messages on a manual stream that the application has not consumed. A message that has begun may always be
finished, whatever is held: it takes one of the incomplete messages that a side accepts over all streams, so unread
streams would otherwise stop the others. A slow reader thus holds at most one window and two messages: one that exceeds
the window, and one that began with the credit left behind it. Grants are collected until they amount to a quarter of
the window. A stream whose window is fully open takes no memory.
"""

from __future__ import annotations

from .errors import LimitExceeded, ProtocolError

GRANTS_PER_FRAME = 1024


class _Window:
    __slots__ = ("allowance", "held", "missing")

    def __init__(self, allowance: int) -> None:
        self.allowance = allowance  # bytes that the peer may send
        self.held = 0  # bytes of complete messages that are not consumed
        self.missing = 0  # of a message that cannot be finished before the next grant


class ReceiveWindows:
    __slots__ = ("_max_tracked", "_threshold", "_tracked_target", "_windows", "due", "window")

    def __init__(self, window: int, max_tracked: int) -> None:
        self.window = window
        self._threshold = window // 4
        self._max_tracked = max_tracked
        self._tracked_target = max(1, max_tracked // 16)
        self._windows: dict[int, _Window] = {}
        self.due: dict[int, None] = {}  # streams with a grant to send, in order

    def __len__(self) -> int:
        return len(self._windows)

    @property
    def held(self) -> int:
        return sum(window.held for window in self._windows.values())

    def take(self, stream: int, nbytes: int) -> int:
        """``nbytes`` of ``stream`` have arrived. Returns the bytes of the stream that are held.

        Raises ``ProtocolError`` if the bytes exceed the peer's credit.
        """
        window = self._windows.get(stream)
        if window is None:
            window = self._track(stream)
        if nbytes > window.allowance:
            raise ProtocolError(
                f"the peer sent {nbytes} bytes on stream {stream}, but had credit for {window.allowance}"
            )
        window.allowance -= nbytes
        if self.window - window.held - window.allowance >= self._threshold:
            self.due[stream] = None
        return window.held

    def expect(self, stream: int, nbytes: int) -> None:
        """``nbytes`` are missing of the message that is arriving."""
        window = self._windows[stream]
        if window.allowance < min(nbytes, self._threshold):  # the peer may be waiting: see Outbox._schedule
            window.missing = nbytes
            self.due[stream] = None

    def hold(self, stream: int, nbytes: int) -> None:
        """A complete message waits to be consumed."""
        window = self._windows[stream]
        window.held += nbytes
        if self.window - window.held - window.allowance < self._threshold:
            self.due.pop(stream, None)

    def release(self, stream: int, nbytes: int) -> None:
        """The application has consumed ``nbytes`` that were held."""
        window = self._windows[stream]
        window.held -= nbytes
        if self.window - window.held - window.allowance >= self._threshold:
            self.due[stream] = None

    def grants(self, limit: int) -> list[tuple[int, int]]:
        """The next ``(stream, bytes)`` grants, at most ``limit``. They count as granted from now on."""
        grants: list[tuple[int, int]] = []
        while self.due and len(grants) < min(limit, GRANTS_PER_FRAME):
            stream = next(iter(self.due))
            del self.due[stream]
            window = self._windows[stream]
            # Exactly what is missing, so that the peer cannot begin another message with it. Half a window at a time:
            # a fully open one is forgotten.
            most = max(self.window - window.held, min(window.missing, 2 * self._threshold))
            amount = most - window.allowance
            window.allowance, window.missing = most, 0
            grants.append((stream, amount))
            if window.allowance == self.window:
                del self._windows[stream]
        return grants

    def _track(self, stream: int) -> _Window:
        if len(self._windows) >= self._max_tracked:
            raise LimitExceeded("streams whose window is not fully open", len(self._windows) + 1, self._max_tracked)
        if len(self._windows) >= self._tracked_target and not self.due:
            # Amounts below the threshold would be tracked forever: grant them all, so that both sides forget them.
            for number, window in self._windows.items():
                if window.held + window.allowance < self.window:
                    self.due[number] = None
        window = self._windows[stream] = _Window(self.window)
        return window

    def validate_state(self) -> None:
        for stream, window in self._windows.items():
            assert 0 <= window.allowance <= self.window
            assert window.held >= 0
            assert not window.missing or (stream in self.due and window.allowance < window.missing)
            assert (window.allowance, window.held) != (self.window, 0) or stream in self.due
            if self.window - window.held - window.allowance >= self._threshold:
                assert stream in self.due
        for window in map(self._windows.__getitem__, self.due):
            assert window.missing or window.held + window.allowance < self.window
