"""Sent frames, kept until the peer has acknowledged them.

Frames are numbered from 1. A kept frame is the pieces it was sent in: the memory of its payload is referred
to, not copied. After a redial the peer says what it has; the rest is sent again, with the same numbers.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import NamedTuple

from .errors import ProtocolError

__all__ = ["Frame", "Unacknowledged"]


class Frame(NamedTuple):
    """A frame as it goes out, its header included."""

    nbytes: int
    pieces: tuple[bytes | memoryview, ...]


class Unacknowledged:
    """The window of frames between what the peer has acknowledged and what has been made.

    ``acknowledged <= sent <= last``: ``last`` is the newest frame made, ``sent`` the newest one sent on this
    connection; they differ while a replay is under way.
    """

    __slots__ = ("_frames", "_replay", "acknowledged", "last", "nbytes", "sent")

    def __init__(self) -> None:
        self._frames: deque[Frame] = deque()
        self._replay: deque[Frame] = deque()
        self.acknowledged = 0
        self.sent = 0
        self.last = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def replaying(self) -> bool:
        return bool(self._replay)

    def keep(self, frame: Frame) -> None:
        """A new frame goes out. Not while ``replaying``: numbers go out in order."""
        self._frames.append(frame)
        self.nbytes += frame.nbytes
        self.last += 1
        self.sent = self.last

    def acknowledge(self, number: int) -> None:
        """The peer has every frame up to ``number``."""
        if not self.acknowledged <= number <= self.sent:
            raise ProtocolError(
                f"the peer acknowledges frame {number}; it had acknowledged {self.acknowledged} "
                f"and was sent {self.sent} on this connection",
                resumable=True,
            )
        frames = self._frames
        for _ in range(number - self.acknowledged):
            self.nbytes -= frames.popleft().nbytes
        self.acknowledged = number

    def rewind(self, received: int) -> None:
        """A new connection to a peer that has everything up to ``received``: what follows goes out again.

        The caller has checked that ``acknowledged <= received <= last``.
        """
        self.sent = self.last
        self.acknowledge(received)
        self.sent = received
        self._replay = deque(self._frames)

    def next_replayed(self, room: int, *, at_least_one: bool) -> Frame | None:
        """The next frame to send again if it has at most ``room`` bytes, or ``at_least_one`` is asked for."""
        if not self._replay or (self._replay[0].nbytes > room and not at_least_one):
            return None
        self.sent += 1
        return self._replay.popleft()

    def forget_connection(self) -> None:
        self._replay.clear()

    def validate_state(self) -> None:
        assert 0 <= self.acknowledged <= self.sent <= self.last
        assert len(self._frames) == self.last - self.acknowledged
        assert self.nbytes == sum(frame.nbytes for frame in self._frames)
        assert all(frame.nbytes == sum(map(len, frame.pieces)) for frame in self._frames)
        if self._replay:
            assert len(self._replay) == self.last - self.sent
            tail = islice(self._frames, len(self._frames) - len(self._replay), None)
            assert all(again is kept for again, kept in zip(self._replay, tail, strict=True))
