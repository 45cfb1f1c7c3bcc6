"""What a relay tells towards the gateway: acknowledgements and troubles, its own and those from below.

At the gateway itself they are reported to the engine.

Imports nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .acks import Acks
from .commands import Command, Link, Report, ReportTrouble, Send
from .frames import Trouble
from .upstream import Upstream

__all__ = ["Tidings"]


class Tidings:
    """Appends what is to be told to ``commands``. ``upstream``: None at the gateway."""

    def __init__(self, upstream: Upstream | None, gather: float, commands: list[Command]) -> None:
        self._upstream = upstream
        self._commands = commands
        self._acks = Acks(gather)
        self._troubles: dict[str, str] = {}

    @property
    def deadline(self) -> float | None:
        """When ``tell_if_due`` is due, if there is anything to tell."""
        return self._acks.deadline

    # --- acknowledgements -------------------------------------------------------------------------------

    def open(self, root: bytes, now: float) -> None:
        """A version was announced."""
        self._acks.open(root, now)
        self.tell_if_due(now)

    def close(self, root: bytes) -> None:
        self._acks.close(root)

    def failed(self, root: bytes) -> Mapping[str, str]:
        """Why hosts cannot have a version that was announced."""
        return self._acks.failed(root)

    def note(self, root: bytes, ready: Iterable[str], failed: Mapping[str, str], now: float) -> None:
        self._acks.note(root, ready, failed, now)
        self.tell_if_due(now)

    def tell_if_due(self, now: float) -> None:
        up = self._upstream
        if self.deadline is None or now < self.deadline:
            return
        if up is None:
            self._commands += [Report(ack.root, ack.ready, ack.failed) for ack in self._acks.untold(now)]
        elif up.connected_to_control:
            takers = [up.control, up.second] if up.second is not None else [up.control]
            acks = self._acks.untold(now)
            self._commands += [Send(Link(peer, up=True), ack) for peer in takers for ack in acks]
        else:
            self._acks.deadline = None  # told with the greeting

    def tell_everything(self, peer: str, now: float) -> None:
        """All acknowledgements, to a parent that is new or takes them as well from now on."""
        self._commands += [Send(Link(peer, up=True), ack) for ack in self._acks.everything(now)]

    # --- troubles ---------------------------------------------------------------------------------------

    def note_troubles(self, hosts: Iterable[tuple[str, str]]) -> None:
        """Passes on what is new of what hosts cannot reach."""
        news = {name: reason for name, reason in hosts if self._troubles.get(name, "") != reason}
        self._troubles.update(news)
        if not news:
            return
        if self._upstream is None:
            self._commands.append(ReportTrouble(tuple(news.items())))
        elif self._upstream.connected_to_control:
            self._commands.append(Send(Link(self._upstream.control, up=True), Trouble(tuple(news.items()))))

    def tell_troubles(self) -> None:
        """All of them, to a parent that is new."""
        if self._troubles and self._upstream is not None:
            self._commands.append(Send(Link(self._upstream.control, up=True), Trouble(tuple(self._troubles.items()))))
