"""Versions distributed to host processes with real sockets and disks."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from meshgate_sync.distribution.distributor import VersionTracker
from meshgate_sync.errors import BaseUnknown, HostsBehind, MalformedMessage, StoreFull
from meshgate_sync.relay.plan import HostSlot, Routes
from meshgate_sync.store.home import open_version
from meshgate_sync.tree.tree import Directory, File, Piece, piece_digest
from tests.sync.hosts import HostProcess, Job, job
from tests.sync.trees import Content, on_disk, plain

MODEL: dict[bytes, object] = {
    b"a.py": b"one", b"d": {b"b": (b"two", True), b"l": "../a.py", b"e": {}}, b"\xff": b"odd name",
}  # fmt: skip
ROOT = b"r" * 32


class Large(Content):
    """Content with one file of many real pieces."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        rng = random.Random(0)
        parts = [rng.randbytes(64 * 1024) for _ in range(16 * megabytes)]
        self.pieces |= {piece_digest(part): part for part in parts}
        self.data = b"".join(parts)
        self.file = File(tuple(Piece(piece_digest(part), len(part)) for part in parts))

    def with_large(self, model: dict[bytes, object]) -> Directory:
        return Directory({**self.tree(model).entries, b"large": self.file})


@asynccontextmanager
async def running(tmp_path: Path, content: Content, count: int) -> AsyncIterator[Job]:
    async with job(tmp_path / "gateway", content) as made:
        starting = [HostProcess.start(f"h{number}", tmp_path / f"h{number}") for number in range(count)]
        await made.add(await asyncio.gather(*starting))
        yield made


async def test_expected_hosts_count_as_not_ready(tmp_path: Path) -> None:
    content = Content()
    async with job(tmp_path / "gateway", content) as made:
        made.distributor.expect_hosts(["h0", "late"])
        await made.add([await HostProcess.start("h0", tmp_path / "h0")])
        await made.distribute(content.tree(MODEL))
        assert made.last is not None
        assert (made.last.ready, made.last.hosts) == ({"h0"}, 2)
        made.distributor.remove_host("late", None)
        assert made.last.hosts == 1


async def test_sixteen_hosts_get_version_after_version(tmp_path: Path) -> None:
    content = Large(1)
    async with running(tmp_path, content, 16) as job:
        model = dict(MODEL)
        before = content.with_large(model)
        await job.distribute(before)
        assert job.distributor._runner.relay is not None
        assert job.distributor._runner.relay.piece_bytes_sent <= 8 * before.size
        for number in range(5):
            model[b"a.py"] = b"%d" % number
            tree = content.with_large(model)
            asked = job.requested
            await job.distribute(tree, before)
            assert job.requested == asked + 1
            before = tree
        for host in job.hosts.values():
            assert on_disk(host.snapshot(before)) == plain({**model, b"large": content.data})
        assert job.last is not None
        assert (len(job.last.ready), job.last.hosts) == (16, 16)


async def test_no_more_than_a_window_is_requested_from_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshgate_sync.transport.runner._REQUEST_WINDOW", 1_000_000)
    content = Large(4)
    tree = content.with_large(MODEL)
    async with running(tmp_path, content, 1) as job:
        job.withhold = True
        job.publish(tree)
        await asyncio.wait_for(until(lambda: job.requested > 0), 30)
        assert job.requested <= 20  # of 64 large pieces and a few small ones
        job.withhold = False
        job.release()
        await job.distributor.wait(tree.digest, job.hosts, 60)
        assert on_disk(job.hosts["h0"].snapshot(tree)) == plain({**MODEL, b"large": content.data})


async def test_a_version_is_waited_for_while_the_client_is_away(tmp_path: Path) -> None:
    content = Large(1)
    tree = content.with_large(MODEL)
    async with running(tmp_path, content, 1) as job:
        job.withhold, job.client = True, False
        job.publish(tree)
        waiting = asyncio.ensure_future(job.distributor.wait(tree.digest, job.hosts, 0.02))
        await asyncio.wait_for(until(lambda: job.looks > 4), 30)
        assert not waiting.done()
        job.client = True
        with pytest.raises(HostsBehind, match="did not acknowledge"):
            await waiting


async def test_a_version_is_waited_for_while_something_moves() -> None:
    looks = iter([1, 2, None, 3, *[3] * 1000])
    with pytest.raises(HostsBehind, match="did not acknowledge"):
        await VersionTracker().wait(b"r" * 32, ["h0"], 0.01, lambda: next(looks))
    assert next(looks) == 3


async def test_a_host_killed_midway_delays_no_other_and_catches_up(tmp_path: Path) -> None:
    content = Large(4)
    tree = content.with_large(MODEL)
    async with running(tmp_path, content, 6) as job:
        job.withhold = True
        job.publish(tree)
        await asyncio.wait_for(until(lambda: job.requested > 0), 30)
        job.release(0.5)
        victim = job.hosts["h3"]
        await asyncio.wait_for(until(lambda: any((victim.home / "work").glob("*/partial-*"))), 30)
        victim.kill()
        job.withhold = False
        job.release()
        others = sorted(set(job.hosts) - {"h3"})
        await job.distributor.wait(tree.digest, others, 60)
        with pytest.raises(HostsBehind, match="h3: did not acknowledge"):
            await job.distributor.wait(tree.digest, ["h3"], 0.05)
        await victim.stop()
        await job.add([await HostProcess.start("h3", victim.home)])
        await job.distributor.wait(tree.digest, ["h3"], 60)
        for host in job.hosts.values():
            assert on_disk(host.snapshot(tree)) == plain({**MODEL, b"large": content.data})


async def test_a_restarted_host_keeps_its_routes(tmp_path: Path) -> None:
    content = Content()
    tree = content.tree(MODEL)
    async with running(tmp_path, content, 4) as job:
        assert job.distributor.parent_of("h9") is None
        before = job.distributor.add_hosts([HostSlot("h3")])
        assert job.distributor.parent_of("h3") == before["h3"].control[0]
        late = [await HostProcess.start(f"a{number}", tmp_path / f"a{number}") for number in range(9)]
        await job.add(late)
        assert job.distributor.add_hosts([HostSlot("h3")]) == before  # otherwise two hosts could wait for each other
        await job.distribute(tree)


async def test_a_lost_host_fails_waiters_at_once_and_counts_until_it_is_back(tmp_path: Path) -> None:
    content = Content()
    tree = content.tree(MODEL)
    async with running(tmp_path, content, 2) as job:
        await job.distribute(tree)
        waiting = asyncio.ensure_future(job.distributor.wait(b"r" * 32, ["h1"], 60))
        await asyncio.sleep(0)
        job.hosts["h1"].kill()
        job.distributor.remove_host("h1", "its pod was deleted")
        with pytest.raises(HostsBehind, match="h1: its pod was deleted"):
            await waiting
        assert job.last is not None
        assert (job.last.ready, job.last.failed, job.last.hosts) == ({"h0"}, {"h1": "its pod was deleted"}, 2)
        home = job.hosts["h1"].home
        await job.hosts["h1"].stop()
        await job.add([await HostProcess.start("h1", home)])
        await job.distributor.wait(tree.digest, ["h0", "h1"], 60)
        assert (job.last.ready, job.last.failed, job.last.hosts) == ({"h0", "h1"}, {}, 2)


async def test_a_host_that_cannot_reach_its_parent_reports_why(tmp_path: Path) -> None:
    async with running(tmp_path, Content(), 0) as job:
        late = await HostProcess.start("late", tmp_path / "late")
        (routes,) = job.distributor.add_hosts([HostSlot("late")]).values()
        await late.configure(
            Routes(("absent", *routes.control), routes.stripes), {**job.addresses, "absent": ("127.0.0.1", 1)}
        )
        job.hosts["late"] = late
        await asyncio.wait_for(until(lambda: bool(job.distributor.tracker._unreachable.get("late"))), 30)
        with pytest.raises(
            HostsBehind, match=r"late: did not .*; it cannot reach absent at 127.0.0.1:1 \(Connection refused"
        ):
            await job.distributor.wait(b"r" * 32, ["late"], 0.01)


async def test_a_frozen_host_is_routed_around(tmp_path: Path) -> None:
    content = Large(2)
    tree = content.with_large(MODEL)
    async with running(tmp_path, content, 10) as job:
        await job.distribute(content.tree({b"first": b"1"}))
        job.hosts["h1"].freeze()
        job.publish(tree, content.tree({b"first": b"1"}))
        try:
            await job.distributor.wait(tree.digest, sorted(set(job.hosts) - {"h1"}), 60)
        finally:
            job.hosts["h1"].thaw()
        await job.distributor.wait(tree.digest, ["h1"], 60)


async def test_a_full_disk_fails_only_its_own_host(tmp_path: Path) -> None:
    content = Large(2)
    tree = content.with_large(MODEL)
    async with running(tmp_path, content, 3) as job:
        await job.add([await HostProcess.start("small", tmp_path / "small", space=1_000_000)])
        job.publish(tree)
        await job.distributor.wait(tree.digest, ["h0", "h1", "h2"], 60)
        with pytest.raises(HostsBehind, match="small: no space left on the disk that holds"):
            await job.distributor.wait(tree.digest, job.hosts, 60)


async def test_a_full_disk_of_the_gateway_is_not_blamed_on_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    content = Content()
    tree = content.tree(MODEL)

    def full(*_: object) -> None:
        raise StoreFull("the gateway's home", 0)

    async with running(tmp_path, content, 2) as job:
        with monkeypatch.context() as patch:
            patch.setattr(job.distributor._store, "add", full)
            for host in job.hosts.values():
                host.freeze()  # else they may get the pieces, which are passed on at once, before the disk fails
            try:
                job.publish(tree)
                with pytest.raises(HostsBehind, match=r"the gateway cannot distribute .*no space left") as caught:
                    await job.distributor.wait(tree.digest, job.hosts, 60)
            finally:
                for host in job.hosts.values():
                    host.thaw()
        assert caught.value.hosts == {}
        assert job.last is not None
        assert (list(job.last.failed), job.last.hosts) == (["the gateway"], 2)
        job.publish(tree)
        await job.distributor.wait(tree.digest, job.hosts, 60)
        assert (job.last.failed, job.last.ready) == ({}, {"h0", "h1"})
    assert "unexpected error" not in caplog.text


async def test_two_drivers_distribute_versions_to_the_same_hosts(tmp_path: Path) -> None:
    one, two = Large(1), Content()
    first, second = one.with_large(MODEL), two.tree({b"other": b"project"})

    async def driver(owner: str, content: Content, tree: Directory, edits: int) -> None:
        async with job(tmp_path / "gateway", content, owner=owner) as made:
            homes = [tmp_path / f"h{number}" for number in range(4)]
            await made.add([await HostProcess.start(home.name, home, owner=owner) for home in homes])
            before = None
            for number in range(edits):
                edited = Directory({**tree.entries, b"n": content.tree({b"x": b"%d" % number}).entries[b"x"]})
                await (made.distribute(edited, before) if before is not None else made.distribute(edited))
                before = edited
            assert before is not None
            for home in homes:
                with open_version(str(home), before.digest.hex()) as version:
                    assert on_disk(version.path)[b"n"] == b"%d" % (edits - 1)

    await asyncio.gather(driver("one", one, first, 8), driver("two", two, second, 12))


async def test_wait_may_come_before_publish(tmp_path: Path) -> None:
    content = Content()
    tree = content.tree(MODEL)
    async with running(tmp_path, content, 2) as job:
        waiting = asyncio.ensure_future(job.distributor.wait(tree.digest, job.hosts, 30))
        await asyncio.sleep(0)
        job.publish(tree, inline=True)
        await waiting
        assert job.requested == 0


async def test_a_retired_version_is_distributed_again_when_it_is_needed(tmp_path: Path) -> None:
    content = Content()
    first, second = content.tree(MODEL), content.tree({b"a": b"2"})
    async with running(tmp_path, content, 2) as job:
        job.publish(first)
        await job.distributor.tracker.wait(first.digest, job.hosts, 30)
        job.publish(second, first)
        await job.distributor.tracker.wait(second.digest, job.hosts, 30)
        assert not any(os.path.exists(host.snapshot(first)) for host in job.hosts.values())  # noqa: ASYNC240
        await job.distributor.wait(first.digest, job.hosts, 30)
        await job.distributor.wait(second.digest, job.hosts, 30)
        for host in job.hosts.values():
            assert on_disk(host.snapshot(first)) == plain(MODEL)
            assert on_disk(host.snapshot(second)) == {b"a": b"2"}
        asked = job.requested
        job.distributor.publish(first.digest)
        await job.distributor.wait(first.digest, job.hosts, 30)
        assert job.requested == asked
        assert job.distributor.current == first.digest


async def test_a_version_published_again_is_not_ready_on_hosts_that_collected_it(tmp_path: Path) -> None:
    content = Content()
    first, second = content.tree(MODEL), content.tree({b"a": b"2"})
    async with running(tmp_path, content, 2) as job:
        await job.distribute(first)
        await job.distribute(second, first)
        for host in job.hosts.values():
            await asyncio.to_thread(shutil.rmtree, host.snapshot(first))
        job.distributor.publish(first.digest)
        await job.distributor.wait(first.digest, job.hosts, 30)
        for host in job.hosts.values():
            assert on_disk(host.snapshot(first)) == plain(MODEL)


async def test_a_restarted_gateway_has_its_versions(tmp_path: Path) -> None:
    content = Content()
    tree = content.tree(MODEL)
    async with running(tmp_path, content, 1) as job:
        await job.distribute(tree)
    async with running(tmp_path, content, 1) as job:
        assert job.distributor.has_base(tree.digest)
        job.distributor.publish(tree.digest)
        await job.distributor.wait(tree.digest, job.hosts, 30)
        assert job.requested == 0


async def test_what_a_process_writes_into_its_version_is_not_in_the_next(tmp_path: Path) -> None:
    content = Content()
    first, second = content.tree(MODEL), content.tree({**MODEL, b"new": b"2"})
    async with running(tmp_path, content, 2) as job:
        await job.distribute(first)
        for host in job.hosts.values():
            with open_version(str(host.home), first.digest.hex()) as version:
                await asyncio.to_thread(overwrite, Path(version.path, "a.py"))
        await job.distribute(second, first)
        for host in job.hosts.values():
            version = await asyncio.to_thread(open_version, str(host.home), second.digest.hex())
            assert on_disk(version.path) == plain({**MODEL, b"new": b"2"})
            version.close()


async def test_invalid_offers_are_rejected(tmp_path: Path) -> None:
    content = Content()
    tree = content.tree(MODEL)
    async with running(tmp_path, content, 1) as job:
        with pytest.raises(BaseUnknown):
            job.publish(tree, content.tree({b"never": b"seen"}))
        with pytest.raises(BaseUnknown):
            job.distributor.publish(tree.digest)
        with pytest.raises(MalformedMessage, match="its delta leads to"):
            job.distributor.publish(b"r" * 32, b"MGD1" + bytes(64) + bytes(4))
        await job.distribute(tree)


def overwrite(path: Path) -> None:
    path.chmod(0o644)
    path.write_bytes(b"overwritten")


async def until(condition: Callable[[], bool]) -> None:
    """Polls ``condition``."""
    while not condition():  # noqa: ASYNC110 - it depends on another process
        await asyncio.sleep(0.01)


async def test_waiting_ends_when_the_last_host_is_ready() -> None:
    tracker = VersionTracker()
    waiting = asyncio.ensure_future(tracker.wait(ROOT, ["a", "b"], 10))
    await asyncio.sleep(0)
    assert tracker.is_awaited(ROOT)
    tracker.add(ROOT, ["a"], {})
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    tracker.add(ROOT, ["b", "c"], {})
    await waiting
    assert not tracker.is_awaited(ROOT)
    await tracker.wait(ROOT, ["a"], 0)


async def test_a_wait_that_is_cancelled_as_a_host_reports_ends() -> None:
    """With ``asyncio.wait_for``, before Python 3.12, the report won: the wait went on for its whole timeout."""
    tracker = VersionTracker()
    waiting = asyncio.ensure_future(tracker.wait(ROOT, ["a", "b"], 10))
    await asyncio.sleep(0)
    tracker.add(ROOT, ["a"], {})
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not tracker.is_awaited(ROOT)


async def test_a_failed_host_is_named_with_its_reason_at_once() -> None:
    tracker = VersionTracker()
    waiting = asyncio.ensure_future(tracker.wait(ROOT, ["a", "b"], 10))
    await asyncio.sleep(0)
    tracker.add(ROOT, ["a"], {"b": "no space left"})
    with pytest.raises(HostsBehind, match="b: no space left") as caught:
        await waiting
    assert caught.value.hosts == {"b": "no space left"}
    await tracker.wait(ROOT, ["a"], 10)


async def test_silent_hosts_are_named_after_the_timeout() -> None:
    tracker = VersionTracker()
    tracker.add(ROOT, ["a"], {})
    with pytest.raises(HostsBehind, match="did not acknowledge") as caught:
        await tracker.wait(ROOT, ["a", "b", "c"], 0.01)
    assert set(caught.value.hosts) == {"b", "c"}
    assert not tracker.is_awaited(ROOT)


async def test_a_failed_gateway_is_named_at_once_and_no_host_is() -> None:
    tracker = VersionTracker()
    waiting = asyncio.ensure_future(tracker.wait(ROOT, ["a", "b"], 10))
    await asyncio.sleep(0)
    tracker.set_gateway(ROOT, "no space left")
    with pytest.raises(HostsBehind, match=r"^the gateway cannot distribute version .*: no space left$") as caught:
        await waiting
    assert (caught.value.hosts, caught.value.gateway) == ({}, "no space left")
    tracker.set_gateway(ROOT, None)
    tracker.add(ROOT, ["a", "b"], {})
    await tracker.wait(ROOT, ["a", "b"], 10)


async def test_a_late_host_is_named_with_what_it_cannot_reach() -> None:
    tracker = VersionTracker()
    tracker.set_unreachable("a", "cannot reach h3 at 10.0.0.3:1 (refused)")
    tracker.set_unreachable("b", "cannot reach h3 at 10.0.0.3:1 (refused)")
    tracker.set_unreachable("b", "")
    with pytest.raises(HostsBehind) as caught:
        await tracker.wait(ROOT, ["a", "b"], 0.01)
    late = "did not acknowledge it, and nothing moved for 0 s"
    assert caught.value.hosts == {"a": f"{late}; it cannot reach h3 at 10.0.0.3:1 (refused)", "b": late}
    tracker.host_started("a")
    with pytest.raises(HostsBehind) as caught:
        await tracker.wait(ROOT, ["a"], 0.01)
    assert caught.value.hosts == {"a": late}


async def test_a_cancelled_wait_leaves_the_others_waiting() -> None:
    tracker = VersionTracker()
    impatient = asyncio.ensure_future(tracker.wait(ROOT, ["a"], 10))
    patient = asyncio.ensure_future(tracker.wait(ROOT, ["a"], 10))
    await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.wait([impatient])
    assert tracker.is_awaited(ROOT)
    tracker.add(ROOT, ["a"], {})
    await patient


def test_retired_versions_and_lost_hosts_are_not_ready() -> None:
    tracker = VersionTracker()
    tracker.add(ROOT, ["a", "b"], {})
    tracker.host_lost("a", "its pod was deleted")
    assert tracker.status(ROOT).ready == {"b"}
    tracker.add(ROOT, [], {"b": "lost it"})
    assert tracker.status(ROOT).ready == set()
    tracker.retire(ROOT)
    assert tracker.status(ROOT).failed == {}
