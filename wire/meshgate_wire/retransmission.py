"""Sent frames, kept until the peer has acknowledged them.

Frames are numbered from 1. A frame is kept as the pieces that were sent, so its payload is not copied. On a new
connection the peer reports the last frame that it received, and the later ones are sent again with the same numbers.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import NamedTuple

from .errors import ProtocolError


class Frame(NamedTuple):
    """A frame with its header."""

    nbytes: int
    pieces: tuple[bytes | memoryview, ...]


class Unacknowledged:
    """The frames that the peer has not acknowledged.

    ``acknowledged <= sent <= last``: ``last`` is the newest frame, ``sent`` the newest one sent on this connection.
    They differ during a replay.
    """

    __slots__ = ("_frames", "acknowledged", "last", "nbytes", "replay", "sent")

    def __init__(self) -> None:
        self._frames: deque[Frame] = deque()
        self.replay: deque[Frame] = deque()  # frames that must be sent again
        self.acknowledged = 0
        self.sent = 0
        self.last = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._frames)

    def keep(self, frame: Frame) -> None:
        """Adds a new frame, which is being sent. Must not be called during a ``replay``: frames are sent in order."""
        self._frames.append(frame)
        self.nbytes += frame.nbytes
        self.last += 1
        self.sent = self.last

    def acknowledge(self, number: int) -> None:
        """The peer has received every frame up to ``number``."""
        if not self.acknowledged <= number <= self.sent:
            raise ProtocolError(
                f"the peer acknowledged frame {number}, which is not between the last acknowledged frame "
                f"{self.acknowledged} and the last sent frame {self.sent}",
                resumable=True,
            )
        frames = self._frames
        for _ in range(number - self.acknowledged):
            self.nbytes -= frames.popleft().nbytes
        self.acknowledged = number

    def rewind(self, received: int) -> None:
        """Starts a replay on a new connection to a peer that has received every frame up to ``received``.

        The caller must have checked that ``acknowledged <= received <= last``.
        """
        self.sent = self.last
        self.acknowledge(received)
        self.sent = received
        self.replay = deque(self._frames)

    def next_replayed(self, max_bytes: int, *, at_least_one: bool) -> Frame | None:
        """The next frame to replay, if it has at most ``max_bytes`` or ``at_least_one`` is set."""
        if not self.replay or (self.replay[0].nbytes > max_bytes and not at_least_one):
            return None
        self.sent += 1
        return self.replay.popleft()

    def stop_replay(self) -> None:
        self.replay.clear()

    def validate_state(self) -> None:
        assert 0 <= self.acknowledged <= self.sent <= self.last
        assert len(self._frames) == self.last - self.acknowledged
        assert self.nbytes == sum(frame.nbytes for frame in self._frames)
        assert all(frame.nbytes == sum(map(len, frame.pieces)) for frame in self._frames)
        if self.replay:
            assert len(self.replay) == self.last - self.sent
            tail = islice(self._frames, len(self._frames) - len(self.replay), None)
            assert all(again is kept for again, kept in zip(self.replay, tail, strict=True))
