"""The receiver's half of flow control: how much each stream may still send, and when it may send more.

Per stream the peer may have ``window`` bytes under way. Bytes are granted again as they arrive, except those
of whole messages that the application has not consumed on a manual stream: so a slow reader holds at most a
window, plus the one message that was being put together. Grants are gathered until they make a quarter of the
window, and a stream whose window is open again costs no memory.
"""

from __future__ import annotations

from .errors import LimitExceeded, ProtocolError

__all__ = ["ReceiveWindows"]

GRANTS_PER_FRAME = 1024


class _Window:
    __slots__ = ("allowance", "held")

    def __init__(self, allowance: int) -> None:
        self.allowance = allowance  # what the peer may still send
        self.held = 0  # whole messages, not yet consumed


class ReceiveWindows:
    __slots__ = ("_due", "_max_tracked", "_threshold", "_tracked_target", "_windows", "window")

    def __init__(self, window: int, max_tracked: int) -> None:
        self.window = window
        self._threshold = window // 4
        self._max_tracked = max_tracked
        self._tracked_target = max(1, max_tracked // 16)
        self._windows: dict[int, _Window] = {}
        self._due: dict[int, None] = {}  # streams to grant to, in order

    def __len__(self) -> int:
        return len(self._windows)

    @property
    def due(self) -> bool:
        return bool(self._due)

    @property
    def held(self) -> int:
        return sum(window.held for window in self._windows.values())

    def take(self, stream: int, nbytes: int) -> None:
        """``nbytes`` of ``stream`` have arrived. Raises ProtocolError where the peer had no credit for them."""
        window = self._windows.get(stream)
        if window is None:
            window = self._track(stream)
        if nbytes > window.allowance:
            raise ProtocolError(
                f"the peer sent {nbytes} bytes on stream {stream}, where it had credit for {window.allowance}"
            )
        window.allowance -= nbytes
        if self.window - window.held - window.allowance >= self._threshold:
            self._due[stream] = None

    def hold(self, stream: int, nbytes: int) -> None:
        """A whole message waits for the application."""
        window = self._windows[stream]
        window.held += nbytes
        if self.window - window.held - window.allowance < self._threshold:
            self._due.pop(stream, None)

    def release(self, stream: int, nbytes: int) -> None:
        """The application is done with ``nbytes`` of what was held."""
        window = self._windows[stream]
        window.held -= nbytes
        if self.window - window.held - window.allowance >= self._threshold:
            self._due[stream] = None

    def grants(self, most: int) -> list[tuple[int, int]]:
        """The next ``(stream, bytes)`` to grant, ``most`` at most, which count as granted from here on."""
        grants: list[tuple[int, int]] = []
        while self._due and len(grants) < min(most, GRANTS_PER_FRAME):
            stream = next(iter(self._due))
            del self._due[stream]
            window = self._windows[stream]
            amount = self.window - window.held - window.allowance
            window.allowance += amount
            grants.append((stream, amount))
            if window.allowance == self.window:
                del self._windows[stream]
        return grants

    def _track(self, stream: int) -> _Window:
        if len(self._windows) >= self._max_tracked:
            raise LimitExceeded("streams with a window not wholly open", len(self._windows) + 1, self._max_tracked)
        if len(self._windows) >= self._tracked_target and not self._due:
            # Residues below the threshold would be remembered for ever: grant them all, both sides forget.
            for number, window in self._windows.items():
                if window.held + window.allowance < self.window:
                    self._due[number] = None
        window = self._windows[stream] = _Window(self.window)
        return window

    def validate_state(self) -> None:
        for stream, window in self._windows.items():
            assert 0 <= window.allowance <= self.window
            assert window.held >= 0
            assert (window.allowance, window.held) != (self.window, 0) or stream in self._due
            if self.window - window.held - window.allowance >= self._threshold:
                assert stream in self._due
        assert all(self._windows[s].held + self._windows[s].allowance < self.window for s in self._due)
