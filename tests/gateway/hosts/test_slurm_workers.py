"""Workers that register with the gateway, and others that try."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from meshgate_gateway.hosts.slurm_workers import Worker, Workers
from meshgate_gateway.supervisor.supervisor import Kept

SECRET = "s3cret"
DEADLINE = 60.0


class Supervisor:
    """Keeps descriptors as the real one does: in copies."""

    def __init__(self) -> None:
        self.kept: dict[str, Kept] = {}

    def keep(self, key: str, note: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        self.close(key)
        self.kept[key] = Kept(note, [os.dup(descriptor) for descriptor in descriptors])

    def close(self, *keys: str) -> None:
        for key in keys:
            for descriptor in self.kept.pop(key, Kept({})).descriptors:
                os.close(descriptor)


class Gateway:
    def __init__(self) -> None:
        self.supervisor = Supervisor()
        self.changes = asyncio.Event()
        self.gone: asyncio.Queue[Worker] = asyncio.Queue()
        self.workers = Workers(2, SECRET, self.supervisor, changed=self.changes.set, gone=self.gone.put_nowait)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]

    async def register(self, **facts: Any) -> tuple[dict[str, Any], asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        place = {"node": "n1", "address": "tcp://10.0.0.1:5000", "identity": ""}
        hello = {"secret": SECRET, "rank": 0, "python": "3.11.7", **place, **facts}
        writer.write(json.dumps(hello).encode() + b"\n")
        return json.loads(await reader.readline()), writer


def with_gateway(test: Callable[[Gateway], Awaitable[None]]) -> None:
    async def run() -> None:
        gateway = Gateway()
        await gateway.workers.listen(gateway.listener)
        try:
            await asyncio.wait_for(test(gateway), DEADLINE)
        finally:
            await gateway.workers.close()
            gateway.supervisor.close(*gateway.supervisor.kept)

    asyncio.run(run())


def test_a_worker_is_known_while_it_is_connected() -> None:
    async def test(gateway: Gateway) -> None:
        reply, writer = await gateway.register(rank=1, node="n2")
        assert reply == {"ok": True}
        worker = gateway.workers.by_rank[1]
        assert (worker.host.name, worker.host.address, worker.connected) == ("n2", "tcp://10.0.0.1:5000", True)
        assert (worker.host.python, worker.host.monarch) == ("3.11.7", "")
        assert gateway.changes.is_set()
        writer.close()
        assert await gateway.gone.get() is worker
        assert not worker.connected

    with_gateway(test)


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"secret": "other"}, "the secret is not that of this job"),
        ({"rank": 2}, "rank 2 is not one of the job's 2"),
        ({"rank": -1}, "invalid registration"),
        ({"node": ""}, "invalid registration"),
    ],
)
def test_others_get_the_reason_why_they_cannot_join(facts: dict[str, Any], problem: str) -> None:
    async def test(gateway: Gateway) -> None:
        reply, writer = await gateway.register(**facts)
        assert problem in reply["error"]
        assert not gateway.workers.by_rank
        writer.close()

    with_gateway(test)


def test_a_rank_is_given_once() -> None:
    async def test(gateway: Gateway) -> None:
        _, first = await gateway.register()
        reply, second = await gateway.register(node="n9")
        assert reply["error"] == "rank 0 is already taken, by the worker on n1"
        assert gateway.workers.by_rank[0].host.name == "n1"
        first.close()
        second.close()

    with_gateway(test)


def test_a_line_without_end_takes_no_memory() -> None:
    async def test(gateway: Gateway) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(b"x" * 100_000)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()

    with_gateway(test)


def test_a_further_server_takes_the_workers_over() -> None:
    async def test(gateway: Gateway) -> None:
        _, first = await gateway.register(rank=0)
        _, second = await gateway.register(rank=1, node="n2")
        gateway.workers.record_loss(gateway.workers.by_rank[1], "it broke")
        inherited = Supervisor()
        for key, kept in gateway.supervisor.kept.items():
            inherited.keep(key, kept.note, kept.descriptors)
        successor = Workers(2, SECRET, inherited, changed=lambda: None, gone=gateway.gone.put_nowait)
        await successor.listen(socket.create_server(("127.0.0.1", 0)))
        assert {rank: (worker.connected, worker.lost) for rank, worker in successor.by_rank.items()} == {
            0: (True, None),
            1: (False, "it broke"),
        }
        first.close()
        second.close()
        gone = [await gateway.gone.get() for _ in range(3)]
        assert successor.by_rank[0] in gone
        await successor.close()

    with_gateway(test)
