"""The receiving side of flow control: how much the peer may send on each stream, and when it may send more.

The peer may have ``window`` bytes in flight per stream. Bytes are granted again when they arrive, except those of
complete messages on a manual stream that the application has not consumed. A slow reader thus holds at most one window
and one incomplete message. Grants are collected until they amount to a quarter of the window. A stream whose window is
fully open takes no memory.
"""

from __future__ import annotations

from .errors import LimitExceeded, ProtocolError

GRANTS_PER_FRAME = 1024


class _Window:
    __slots__ = ("allowance", "held")

    def __init__(self, allowance: int) -> None:
        self.allowance = allowance  # bytes that the peer may send
        self.held = 0  # bytes of complete messages that are not consumed


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

    def take(self, stream: int, nbytes: int) -> None:
        """``nbytes`` of ``stream`` have arrived. Raises ``ProtocolError`` if they exceed the peer's credit."""
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
            amount = self.window - window.held - window.allowance
            window.allowance += amount
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
            assert (window.allowance, window.held) != (self.window, 0) or stream in self.due
            if self.window - window.held - window.allowance >= self._threshold:
                assert stream in self.due
        assert all(self._windows[s].held + self._windows[s].allowance < self.window for s in self.due)
