"""The network between drivers and the gateway: delays bytes, cuts them at any place, and refuses connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from tests.simulation.processes import Process, World

PIECES = (1, 7, 100, 1400, 1 << 16)  # bytes that may travel together


class Network:
    """Connects drivers to the unix socket at ``address``. ``delay`` is the latency in seconds, one way, at most."""

    def __init__(self, world: World, address: str) -> None:
        self.world, self._address = world, address
        self.delay = 0.001
        self.refusing = False
        self.process = Process(world, "network")
        self._connections: list[_Connection] = []

    def connect(self) -> socket.socket:
        """A driver's end of a new connection. Raises OSError."""
        if self.refusing:
            raise ConnectionRefusedError("the network is down")
        theirs, ours = socket.socketpair()
        with self.process._current():  # the network's sockets stay open if the driver dies
            near = ours.detach()
            near_socket = socket.socket(fileno=near)
            far = socket.socket(socket.AF_UNIX)
            far.setblocking(False)
        try:
            far.connect(self._address)
        except OSError:
            for end in (theirs, near_socket, far):
                end.close()
            raise
        near_socket.setblocking(False)
        theirs.setblocking(False)
        self._connections.append(_Connection(self, near_socket, far))
        return theirs

    def _open(self) -> list[_Connection]:
        """The connections that work. The others are kept: none of their ends is closed that was not."""
        return [connection for connection in self._connections if connection.open]

    def cut(self) -> None:
        """Ends every connection. What is on the way is lost."""
        for connection in self._open():
            connection.close()

    def cut_silently(self) -> None:
        """Nothing arrives any more, and neither end is notified."""
        for connection in self._open():
            connection.freeze()

    def cut_one_end(self) -> None:
        """The driver sees the end of its connections, and the gateway does not."""
        for connection in self._open():
            connection.close(far=False)

    def hold(self, seconds: float) -> None:
        """What drivers send on the present connections arrives, in order, but not for a time. New ones are not held."""
        for connection in self._open():
            connection.held_until = self.world.now + seconds


class _Connection:
    """Copies bytes between a driver's connection and the gateway's."""

    def __init__(self, network: Network, near: socket.socket, far: socket.socket) -> None:
        self._network, self._near, self._far = network, near, far
        self.open = True
        self.held_until = 0.0
        self._loop = network.process.loop
        self._tasks = [self._loop.create_task(self._copy(near, far)), self._loop.create_task(self._copy(far, near))]
        self._closing: asyncio.Task[None] | None = None

    def freeze(self) -> None:
        self.open = False
        for task in self._tasks:
            task.cancel()

    def close(self, *, far: bool = True) -> None:
        self.freeze()
        self._closing = self._loop.create_task(self._close(far))

    async def _close(self, far: bool) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)  # they wait for these sockets until then
        self._near.close()
        if far:
            self._far.close()

    async def _copy(self, source: socket.socket, target: socket.socket) -> None:
        loop, chance = asyncio.get_running_loop(), self._network.world.chance
        try:
            while data := await loop.sock_recv(source, chance.choice(PIECES)):
                if self._network.delay:
                    await asyncio.sleep(chance.uniform(0, self._network.delay))
                if source is self._near:
                    await asyncio.sleep(max(0.0, self.held_until - loop.time()))
                await loop.sock_sendall(target, data)
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_WR)
        except OSError:
            self.close()
