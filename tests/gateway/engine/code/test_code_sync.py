"""Versions of the code: what spawns wait for. The distributor is real, and has no hosts below it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from meshgate_gateway.engine.code import code_sync
from meshgate_gateway.engine.code.code_sync import CodeSync
from meshgate_gateway.engine.code.host_agents import PROCESS_MODULES, worker_sources
from meshgate_gateway.engine.engine_metrics import EngineMetrics
from meshgate_gateway.engine.failures import RequestFailed
from meshgate_gateway.engine.objects.records import HostMesh
from meshgate_gateway.engine.objects.table import ObjectTable
from meshgate_sync.distribution.distributor import Progress
from meshgate_sync.errors import HostsBehind
from meshgate_sync.relay.plan import HostSlot
from meshgate_sync.tree.delta import diff, encode, full_delta
from meshgate_sync.upload import SyncGone, SyncOffer, compress, pack
from meshgate_wire import Fragments, Limits
from meshgate_wire.message_codec import dump_header
from meshgate_wire.messages import SYNC_STREAM, Sync
from tests.gateway.engine.fakes import Sent, host_mesh, turns, until
from tests.sync.trees import Content

FIRST = Content()
FIRST_TREE = FIRST.tree({b"a.py": b"print(1)"})
SECOND = Content()
SECOND_TREE = SECOND.tree({b"a.py": b"print(2)"})
V1, V2 = FIRST_TREE.digest.hex(), SECOND_TREE.digest.hex()


class FakeAgents:
    def __init__(self) -> None:
        self.provided: list[str] = []
        self.lost: list[str] = []
        self.replaced: list[str] = []
        self.waited: list[list[str]] = []
        self.roots: list[str] = []
        self.blocked: set[str] = set()
        self.missing: dict[str, str] = {}
        self.closed = False

    def provide(self, hosts: HostMesh) -> None:
        self.provided.append(hosts.name)

    async def wait_ready(self, names: Iterable[str], root: str) -> None:
        self.waited.append(list(names))
        self.roots.append(root)
        if root in self.blocked:
            await asyncio.Event().wait()
        if self.missing:
            raise HostsBehind(root, self.missing)

    def host_lost(self, name: str, reason: str) -> None:
        self.lost.append(name)

    def host_replaced(self, name: str) -> None:
        self.replaced.append(name)

    def process_ended(self, number: int, rank: int) -> bool:
        return number < 0

    async def close(self) -> None:
        self.closed = True


class Synced:
    """A code sync, and what a client sends to it."""

    def __init__(self) -> None:
        self.objects, self.sent, self.agents = ObjectTable(), Sent(), FakeAgents()
        self.made = 0
        self.metrics = EngineMetrics(lambda counts: None)
        self.connected = [True]  # at each look; the last one stays
        self.sync = CodeSync(self.objects, self.sent, self._make_agents, None, self.metrics, self._is_connected)

    def _is_connected(self) -> bool:
        return self.connected.pop(0) if len(self.connected) > 1 else self.connected[0]

    def _make_agents(self, *_: Any, **__: Any) -> FakeAgents:
        self.made += 1
        return self.agents

    async def send(self, message: BaseModel, *buffers: bytes) -> None:
        header = Sync(body=message.model_dump_json())
        await self.sync.sync(header, [Fragments((data,)) for data in buffers])

    async def offer(self, content: Content, delta: bytes, root: str) -> None:
        pieces = pack(list(content.pieces.items()))
        message = SyncOffer(root=root, delta_size=len(delta), pack_size=len(pieces))
        await self.send(message, compress(delta), compress(pieces))

    async def offer_first(self) -> None:
        await self.offer(FIRST, encode(full_delta(FIRST_TREE)), V1)

    async def offer_second(self) -> None:
        await self.offer(SECOND, encode(full_delta(SECOND_TREE)), V2)

    def received(self, kind: str) -> list[dict[str, Any]]:
        """The sync messages of one type that the client got."""
        assert all(stream == SYNC_STREAM for _, stream, _ in self.sent.messages)
        bodies = [json.loads(header.body) for header in self.sent.of(Sync)]
        return [body for body in bodies if body["type"] == kind]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHGATE_HOME", str(tmp_path))


@asynccontextmanager
async def syncing() -> AsyncIterator[Synced]:
    synced = Synced()
    try:
        yield synced
    finally:
        await synced.sync.close()


# --- what the client gets


async def test_a_status_names_as_many_failed_hosts_as_fit_and_counts_them_all() -> None:
    async with syncing() as synced:
        failed = {f"workers-{host}": f"host {host}: {'disk full ' * 10_000}" for host in range(5000)}
        failed["the gateway"] = "no space left"
        progress = Progress(bytes.fromhex(V1), frozenset(), failed, hosts=5000, sent=0)
        synced.sync.report_progress(progress)
        (status,) = synced.received("sync_status")
        assert status["failures"] == 5001
        assert 10 < len(status["failed"]) < 5000
        assert status["failed"]["the gateway"] == "no space left"
        assert status["failed"]["workers-0"].startswith("host 0: disk full ")
        assert len(dump_header(synced.sent.of(Sync)[0])) < Limits().max_header


async def test_a_status_lists_the_hosts_that_were_lost() -> None:
    async with syncing() as synced:
        hosts = host_mesh(3)
        hosts.host_lost("workers-1", "OOMKilled", returns=True)
        synced.objects.add(1, hosts)
        failed = {"workers-0": "its disk is full", "workers-1": "OOMKilled"}
        synced.sync.report_progress(Progress(bytes.fromhex(V1), frozenset({"workers-2"}), failed, hosts=3, sent=0))
        (status,) = synced.received("sync_status")
        assert (status["failed"], status["lost"]) == (failed, ["workers-1"])


async def test_a_host_has_a_parent_once_code_is_distributed() -> None:
    async with syncing() as synced:
        assert synced.sync.parent_of("workers-0") == ""
        await synced.offer_first()
        distributor = synced.sync._distributor
        assert distributor is not None
        distributor.add_hosts([HostSlot(f"workers-{rank:02}") for rank in range(20)])
        parents = [synced.sync.parent_of(f"workers-{rank:02}") for rank in range(20)]
        assert parents.count("gateway") < 20
        assert {parent for parent in parents if parent != "gateway"} <= {f"workers-{rank:02}" for rank in range(20)}
        assert synced.sync.parent_of("workers-99") == ""


# --- versions


async def test_a_spawn_waits_until_its_version_is_offered() -> None:
    async with syncing() as synced:
        waiting = asyncio.ensure_future(synced.sync.wait_for_version(V1, []))
        await turns()
        assert not waiting.done()
        await synced.offer_first()
        assert await waiting == V1


async def test_a_version_that_is_not_offered_in_time_fails_the_spawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_sync, "OFFER_TIMEOUT", 0.01)
    async with syncing() as synced:
        with pytest.raises(RequestFailed, match=f"the client did not send version {V1[:12]} of the code") as caught:
            await synced.sync.wait_for_version(V1, [])
        assert caught.value.failure.kind == "stale_code"


async def test_a_spawn_waits_for_its_version_while_the_client_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_sync, "OFFER_TIMEOUT", 0.01)
    async with syncing() as synced:
        synced.connected = [True, *[False] * 5, True]
        with pytest.raises(RequestFailed, match="the client did not send version"):
            await synced.sync.wait_for_version(V1, [])
        assert synced.connected == [True]


async def test_hosts_that_cannot_get_the_version_are_named() -> None:
    async with syncing() as synced:
        await synced.offer_first()
        synced.agents.missing = {"workers-1": "evicted"}
        with pytest.raises(RequestFailed, match="evicted") as caught:
            await synced.sync.wait_for_version(V1, ["workers-1", "", "workers-0", "workers-1"])
        assert caught.value.failure.hosts == {0: "workers-1"}
        assert synced.agents.waited == [["workers-0", "workers-1"]]


async def test_a_version_whose_files_changed_is_superseded_by_the_next_one_offered() -> None:
    async with syncing() as synced:
        synced.agents.blocked.add(V1)
        await synced.offer_first()
        waiting = asyncio.ensure_future(synced.sync.wait_for_version(V1, ["workers-0"]))
        await until(lambda: synced.agents.waited)
        await synced.send(SyncGone(root=V1, path="a.py"))
        await turns()
        assert not waiting.done()
        await synced.offer_second()
        assert await _version_without_hosts(synced, waiting) == V2


async def test_a_version_whose_files_changed_after_the_next_was_offered_is_superseded_at_once() -> None:
    async with syncing() as synced:
        synced.agents.blocked.add(V1)
        await synced.offer_first()
        await synced.offer_second()
        waiting = asyncio.ensure_future(synced.sync.wait_for_version(V1, ["workers-0"]))
        await until(lambda: synced.agents.waited)
        await synced.send(SyncGone(root=V1, path="a.py"))
        assert await _version_without_hosts(synced, waiting) == V2


async def _version_without_hosts(synced: Synced, waiting: asyncio.Future[str]) -> str:
    """The version that ``waiting`` has moved on to, which no host acknowledges here."""
    await until(lambda: synced.agents.roots[-1] != V1)
    waiting.cancel()
    await turns()
    return synced.agents.roots[-1]


async def test_a_version_that_the_client_gives_up_fails_its_spawns_with_the_reason() -> None:
    async with syncing() as synced:
        waiting = asyncio.ensure_future(synced.sync.wait_for_version(V1, ["workers-0"]))
        await turns()
        await synced.send(SyncGone(root=V1, why="the directory was removed"))
        expected = f"the gateway cannot use version {V1[:12]} of the code: the directory was removed"
        with pytest.raises(RequestFailed, match=expected):
            await waiting
        (status,) = synced.received("sync_status")
        assert status["failed"] == {"the gateway": "the directory was removed"}


async def test_a_corrupt_offer_is_rejected_and_a_correct_one_accepted_afterwards() -> None:
    async with syncing() as synced:
        await synced.send(SyncOffer(root=V1, delta_size=3), b"\0bad")
        with pytest.raises(RequestFailed, match=f"the gateway cannot use version {V1[:12]}"):
            await synced.sync.wait_for_version(V1, ["workers-0"])
        await synced.offer_first()
        assert await synced.sync.wait_for_version(V1, []) == V1


async def test_an_offer_against_an_unknown_base_is_answered_with_the_known_ones() -> None:
    async with syncing() as synced:
        await synced.offer(SECOND, encode(diff(FIRST_TREE, SECOND_TREE)), V2)
        assert synced.received("sync_need") == [{"type": "sync_need", "root": V2, "held": []}]
        await synced.offer_first()
        await synced.offer(SECOND, encode(diff(FIRST_TREE, SECOND_TREE)), V2)
        assert await synced.sync.wait_for_version(V2, []) == V2


async def test_an_invalid_message_is_rejected_before_anything_starts() -> None:
    async with syncing() as synced:
        with pytest.raises(RequestFailed, match="invalid sync message"):
            await synced.sync.sync(Sync(body='{"type": "unknown"}'), [])
        assert synced.made == 0


# --- agents


async def test_nothing_starts_before_the_client_offers_a_version() -> None:
    async with syncing() as synced:
        synced.objects.add(1, hosts := host_mesh())
        synced.sync.hosts_attached(hosts)
        synced.sync.host_lost("workers-0", "evicted")
        synced.sync.host_replaced("workers-0")
        assert not synced.sync.process_ended(-5, 0)
        assert synced.made == 0
    assert not synced.agents.closed


async def test_hosts_get_agents_whether_they_join_before_or_after_the_first_version() -> None:
    async with syncing() as synced:
        synced.objects.add(1, host_mesh(name="early"))
        await synced.offer_first()
        assert synced.agents.provided == ["early"]
        synced.sync.hosts_attached(host_mesh(name="late"))
        assert synced.agents.provided == ["early", "late"]
        await synced.offer_second()
        assert synced.made == 1


async def test_agents_are_notified_of_hosts_and_processes_that_end() -> None:
    async with syncing() as synced:
        await synced.sync.start()
        synced.sync.host_lost("workers-0", "evicted")
        synced.sync.host_replaced("workers-0")
        assert (synced.agents.lost, synced.agents.replaced) == (["workers-0"], ["workers-0"])
        assert (synced.sync.process_ended(-5, 0), synced.sync.process_ended(5, 0)) == (True, False)
    assert synced.agents.closed


async def test_a_start_that_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with syncing() as synced:
        with monkeypatch.context() as patch:
            patch.setattr(code_sync.Distributor, "start", _no_address)
            await synced.offer_first()
            assert "no free port" in synced.received("sync_status")[0]["failed"]["the gateway"]
        await synced.offer_first()
        await until(lambda: synced.made == 1)


async def _no_address(*_: object) -> None:
    raise OSError("no free port")


async def test_a_process_without_a_version_gets_no_code() -> None:
    sync = Synced().sync
    assert sync.process_code(None, ["src"]) is None
    assert sync.process_code(V1, ("src",)) == (worker_sources(PROCESS_MODULES), V1, ["src"])


async def test_the_end_of_the_session_is_not_reported_as_stale_code() -> None:
    synced = Synced()
    await synced.offer_first()
    synced.agents.missing = {"workers-0": "the session ended"}
    await synced.sync.close()
    with pytest.raises(asyncio.CancelledError):
        await synced.sync.wait_for_version(V1, ["workers-0"])
