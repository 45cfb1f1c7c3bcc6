"""The forward's end of the socket pair: nothing is lost before the remote end is there, and it ends once."""

from __future__ import annotations

import asyncio
import socket

import pytest

from meshgate.jobs.kubernetes.port_forward.local_end import ForwardFailed, LocalEnd


class Remote:
    def __init__(self) -> None:
        self.received = b""

    def forward(self, data: memoryview) -> None:
        self.received += data

    def pause_receiving(self) -> None: ...

    def resume_receiving(self) -> None: ...


def test_bytes_of_either_side_wait_for_the_start() -> None:
    asyncio.run(_pass_bytes())


async def _pass_bytes() -> None:
    user, forward = socket.socketpair()
    with user:
        user.sendall(b"from the user")
        local, remote = LocalEnd(), Remote()
        local.write(b"from the ")
        await asyncio.get_running_loop().create_connection(lambda: local, sock=forward)
        local.write(b"node")
        assert remote.received == b""
        local.start(remote)
        user.setblocking(False)
        assert await asyncio.get_running_loop().sock_recv(user, 100) == b"from the node"
    await asyncio.wait_for(local.ended, 10)  # the user has closed the other end
    assert remote.received == b"from the user"


def test_the_first_end_counts() -> None:
    async def end_twice() -> None:
        local = LocalEnd()
        local.end(ForwardFailed("first"))
        local.end(None)
        await local.ended

    with pytest.raises(ForwardFailed, match="first"):
        asyncio.run(end_twice())
