"""Bytes over a bare websocket of the library that meshgate uses, on loopback: the limit of the transport.

The server runs in its own process. Arrays are sent in messages of 256 KiB, as meshgate sends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from typing import Any

from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as serve_websocket

from benchmarks.peer import leave, serve

PIECE = 256 << 10


class Bare:
    def open(self) -> dict[str, Any]:
        command = [sys.executable, "-m", __spec__.name, "--server"]
        self._server = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
        assert self._server.stdout is not None
        self._port = int(self._server.stdout.readline())
        self._runner = asyncio.Runner()
        self._socket = self._runner.run(_connected(self._port))
        return {}

    def round_trip(self, calls: int) -> list[float]:
        return self._runner.run(_echoes(self._socket, calls))

    def array_up(self, nbytes: int, times: int) -> list[float]:
        data = bytes(nbytes)
        return self._runner.run(_sent(self._socket, data, times))

    def array_down(self, nbytes: int, times: int) -> list[float]:
        return self._runner.run(_fetched(self._socket, nbytes, times))

    def close(self) -> None:
        self._runner.run(self._socket.close())
        self._runner.close()
        self._server.terminate()
        self._server.wait()


async def _connected(port: int) -> Any:
    # No pings: between its turns this peer does not run the event loop that would answer them.
    return await connect(f"ws://127.0.0.1:{port}", compression=None, max_size=None, proxy=None, ping_interval=None)


async def _echoes(socket: Any, calls: int) -> list[float]:
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        await socket.send("echo 0")
        await socket.recv()
        seconds.append(time.perf_counter() - start)
    return seconds


async def _sent(socket: Any, data: bytes, times: int) -> list[float]:
    seconds = []
    view = memoryview(data)
    for _ in range(times):
        start = time.perf_counter()
        await socket.send(f"take {len(data)}")
        for at in range(0, len(data), PIECE):
            await socket.send(view[at : at + PIECE])
        await socket.recv()
        seconds.append(time.perf_counter() - start)
    return seconds


async def _fetched(socket: Any, nbytes: int, times: int) -> list[float]:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        await socket.send(f"give {nbytes}")
        remaining = nbytes
        while remaining:
            remaining -= len(await socket.recv())
        seconds.append(time.perf_counter() - start)
    return seconds


async def _reply(connection: ServerConnection) -> None:
    async for request in connection:
        what, _, number = str(request).partition(" ")
        nbytes = int(number)
        if what == "give":
            view = memoryview(bytes(nbytes))
            for at in range(0, nbytes, PIECE):
                await connection.send(view[at : at + PIECE])
            continue
        while nbytes:
            nbytes -= len(await connection.recv())
        await connection.send(b"done")


async def _serve() -> None:
    options = {"compression": None, "max_size": None, "ping_interval": None}
    async with serve_websocket(_reply, "127.0.0.1", 0, **options) as server:
        print(next(iter(server.sockets)).getsockname()[1], flush=True)
        await asyncio.get_running_loop().run_in_executor(None, os.read, sys.stdin.fileno(), 1)


if __name__ == "__main__":
    if sys.argv[1:] == ["--server"]:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_serve())
    else:
        serve(Bare())
    leave()
