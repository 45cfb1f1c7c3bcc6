"""Engine processes: started, one of them ahead of its session, talked to, ended.

Starting Monarch takes a third of a second, so an engine is kept ready that has done so. What is sent to an engine
that still starts waits in the channel, so nobody has to know which it was.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence

import structlog

from meshgate_gateway.handoff import ControlChannel, ControlMessage, control_pair
from meshgate_gateway.processes import Child, Exit

__all__ = ["Engine", "EngineSupply"]

log = structlog.get_logger()

REPLENISH_DELAY = 3.0  # a new session starts its processes first: they are what its user waits for


class Engine:
    """One engine process and the channel to it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts it, with ``--control-fd N`` added to the command. Raises OSError."""
        self.session: str | None = None
        ours, theirs = control_pair()
        with theirs:
            try:
                self._child = Child(
                    [*command, "--control-fd", str(theirs.fileno())],
                    environment=environment,
                    descriptors=[theirs.fileno()],
                    on_line=self._log_line,
                )
            except OSError:
                ours.close()
                raise
        self._channel = ControlChannel(ours)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child.running

    def send(self, message: ControlMessage, descriptors: Sequence[int] = ()) -> bool:
        """False when the engine is gone or going: whoever reads its channel learns of that as well."""
        return self._channel.send(message, descriptors)

    async def receive(self) -> ControlMessage | None:
        """The next message; None when the engine has closed the channel, as its end does. For one reader."""
        try:
            received = await self._channel.receive()
        except ValueError as error:
            log.warning("an engine sent what is no message", session=self.session, pid=self.pid, error=str(error))
            return None
        return received[0] if received else None

    async def end(self, grace: float) -> Exit:
        """Closes the channel, gives the process ``grace`` seconds to exit, kills it and what it left."""
        self._channel.close()
        return await self._child.end(grace)

    def kill(self) -> None:
        self._child.signal(signal.SIGKILL)

    def _log_line(self, line: str) -> None:
        log.info("engine output", session=self.session, pid=self.pid, line=line)


class EngineSupply:
    """Engines to take, with up to ``warm`` started ahead."""

    def __init__(self, start: Callable[[], Engine], warm: int) -> None:
        self._start, self._warm = start, warm
        self._spares: list[Engine] = []
        self._replenishing: asyncio.TimerHandle | None = None

    def fill(self) -> None:
        """Starts as many as are missing. One that ends early is replaced when the next is taken, not before."""
        self._replenishing = None
        self._spares = [spare for spare in self._spares if spare.running]
        try:
            while len(self._spares) < self._warm:
                self._spares.append(self._start())
        except OSError as error:
            log.warning("an engine could not be started ahead", error=str(error))

    def take(self) -> Engine:
        """An engine for a session: one that was started ahead, or else a new one. Raises OSError."""
        running = [spare for spare in self._spares if spare.running]
        for dead in (spare for spare in self._spares if not spare.running):
            log.warning("an engine ended before it had a session", pid=dead.pid)
        self._spares = running[1:]
        if self._replenishing is None:
            self._replenishing = asyncio.get_running_loop().call_later(REPLENISH_DELAY, self.fill)
        return running[0] if running else self._start()

    async def close(self) -> None:
        """Ends the spares, which hold nothing."""
        if self._replenishing is not None:
            self._replenishing.cancel()
        spares, self._spares = self._spares, []
        for spare in spares:
            spare.kill()
        await asyncio.gather(*(spare.end(0) for spare in spares))
