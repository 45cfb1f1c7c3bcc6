from __future__ import annotations

import asyncio

import pytest

from meshgate_sync.distribution.version_tracker import VersionTracker
from meshgate_sync.errors import HostsBehind

ROOT = b"r" * 32


def test_waiting_ends_when_the_last_host_is_ready() -> None:
    async def run() -> None:
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

    asyncio.run(run())


def test_a_failed_host_is_named_with_its_reason_at_once() -> None:
    async def run() -> None:
        tracker = VersionTracker()
        waiting = asyncio.ensure_future(tracker.wait(ROOT, ["a", "b"], 10))
        await asyncio.sleep(0)
        tracker.add(ROOT, ["a"], {"b": "no space left"})
        with pytest.raises(HostsBehind, match="b: no space left") as caught:
            await waiting
        assert caught.value.hosts == {"b": "no space left"}
        await tracker.wait(ROOT, ["a"], 10)

    asyncio.run(run())


def test_silent_hosts_are_named_after_the_timeout() -> None:
    async def run() -> None:
        tracker = VersionTracker()
        tracker.add(ROOT, ["a"], {})
        with pytest.raises(HostsBehind, match="did not acknowledge") as caught:
            await tracker.wait(ROOT, ["a", "b", "c"], 0.01)
        assert set(caught.value.hosts) == {"b", "c"}
        assert not tracker.is_awaited(ROOT)

    asyncio.run(run())


def test_a_failed_gateway_is_named_at_once_and_no_host_is() -> None:
    async def run() -> None:
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

    asyncio.run(run())


def test_a_late_host_is_named_with_what_it_cannot_reach() -> None:
    async def run() -> None:
        tracker = VersionTracker()
        tracker.set_unreachable("a", "cannot reach h3 at 10.0.0.3:1 (refused)")
        tracker.set_unreachable("b", "cannot reach h3 at 10.0.0.3:1 (refused)")
        tracker.set_unreachable("b", "")
        with pytest.raises(HostsBehind) as caught:
            await tracker.wait(ROOT, ["a", "b"], 0.01)
        late = "did not acknowledge it within 0 s"
        assert caught.value.hosts == {"a": f"{late}; it cannot reach h3 at 10.0.0.3:1 (refused)", "b": late}
        tracker.host_started("a")
        with pytest.raises(HostsBehind) as caught:
            await tracker.wait(ROOT, ["a"], 0.01)
        assert caught.value.hosts == {"a": late}

    asyncio.run(run())


def test_a_cancelled_wait_leaves_the_others_waiting() -> None:
    async def run() -> None:
        tracker = VersionTracker()
        impatient = asyncio.ensure_future(tracker.wait(ROOT, ["a"], 10))
        patient = asyncio.ensure_future(tracker.wait(ROOT, ["a"], 10))
        await asyncio.sleep(0)
        impatient.cancel()
        await asyncio.wait([impatient])
        assert tracker.is_awaited(ROOT)
        tracker.add(ROOT, ["a"], {})
        await patient

    asyncio.run(run())


def test_retired_versions_and_lost_hosts_are_not_ready() -> None:
    tracker = VersionTracker()
    tracker.add(ROOT, ["a", "b"], {})
    tracker.host_lost("a", "its pod was deleted")
    assert tracker.status(ROOT).ready == {"b"}
    tracker.add(ROOT, [], {"b": "lost it"})
    assert tracker.status(ROOT).ready == set()
    tracker.retire(ROOT)
    assert tracker.status(ROOT).failed == {}
