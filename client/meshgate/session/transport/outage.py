"""What the user sees of a time without a connection: a line after a while, and the reason in what waits for it.

Calls wait while there is no connection, and nothing is lost, so a short outage is not worth a line. After ``quiet``
seconds one line says since when, why, and that calls wait; on a terminal and in a notebook it is updated in place.
Another line says when the connection is back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

UPDATE_INTERVAL = 1.0  # seconds between two updates of the line


class Outage:
    """Whether a session is connected, and since when it is not. All but ``describe`` is called on the event loop.

    ``why`` returns the reason of the latest failure. ``show(text, final)`` shows a line, which takes the place of the
    last one unless that was ``final``.
    """

    def __init__(
        self, gateway: object, quiet: float, why: Callable[[], str], show: Callable[[str, bool], None]
    ) -> None:
        self._gateway, self._quiet, self._why, self._show = gateway, quiet, why, show
        self._loop: asyncio.AbstractEventLoop
        self._since: tuple[float, str] | None = None  # on the loop's clock, and the time of day
        self._before = False  # whether there has been a connection
        self._shown = False
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """There is no connection. Does nothing if there was none before."""
        if self._since is None:
            self._loop = asyncio.get_running_loop()
            self._since = self._loop.time(), time.strftime("%H:%M:%S")
            self._timer = self._loop.call_later(self._quiet, self._report)

    def end(self) -> None:
        """The session is connected."""
        if self._since is not None and self._shown:
            lasted = f"after {self._loop.time() - self._since[0]:.0f} s"
            again = f"again {lasted}; nothing was lost" if self._before else lasted
            self._show(f"connected to {self._gateway} {again}", True)
        self._before = True
        self._clear()

    def close(self) -> None:
        """The session has ended."""
        if self._shown:
            self._show(self.describe(), True)
        self._clear()

    def describe(self) -> str:
        """For people, how long there has been no connection, and why; empty while there is one. From any thread."""
        since = self._since
        if since is None:
            return ""
        lasted = self._loop.time() - since[0]
        return f"no connection to {self._gateway} for {lasted:.0f} s, since {since[1]}: {self._why()}"

    def _report(self) -> None:
        self._shown = True
        self._show(f"{self.describe()}; calls wait, and nothing is lost", False)
        self._timer = self._loop.call_later(UPDATE_INTERVAL, self._report)

    def _clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._since = self._timer = None
        self._shown = False
