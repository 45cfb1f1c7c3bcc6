from __future__ import annotations

import asyncio

import pytest

from meshgate_sync.errors import HostsBehind
from meshgate_sync.versions import Board

ROOT = b"r" * 32


def test_waiting_ends_when_the_last_host_is_ready() -> None:
    async def run() -> None:
        board = Board()
        waiting = asyncio.ensure_future(board.wait(ROOT, ["a", "b"], 10))
        await asyncio.sleep(0)
        assert board.awaited(ROOT)
        board.note(ROOT, ["a"], {})
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
        board.note(ROOT, ["b", "c"], {})
        await waiting
        assert not board.awaited(ROOT)
        await board.wait(ROOT, ["a"], 0)

    asyncio.run(run())


def test_a_host_that_cannot_is_named_with_its_reason_at_once() -> None:
    async def run() -> None:
        board = Board()
        waiting = asyncio.ensure_future(board.wait(ROOT, ["a", "b"], 10))
        await asyncio.sleep(0)
        board.note(ROOT, ["a"], {"b": "no space left"})
        with pytest.raises(HostsBehind, match="b: no space left") as caught:
            await waiting
        assert caught.value.hosts == {"b": "no space left"}
        await board.wait(ROOT, ["a"], 10)

    asyncio.run(run())


def test_hosts_that_say_nothing_are_named_after_the_timeout() -> None:
    async def run() -> None:
        board = Board()
        board.note(ROOT, ["a"], {})
        with pytest.raises(HostsBehind, match="did not acknowledge") as caught:
            await board.wait(ROOT, ["a", "b", "c"], 0.01)
        assert set(caught.value.hosts) == {"b", "c"}
        assert not board.awaited(ROOT)

    asyncio.run(run())


def test_a_gateway_that_cannot_is_named_at_once_and_no_host_is() -> None:
    async def run() -> None:
        board = Board()
        waiting = asyncio.ensure_future(board.wait(ROOT, ["a", "b"], 10))
        await asyncio.sleep(0)
        board.note_gateway(ROOT, "no space left")
        with pytest.raises(HostsBehind, match=r"^the gateway cannot hand on version .*: no space left$") as caught:
            await waiting
        assert (caught.value.hosts, caught.value.gateway) == ({}, "no space left")
        board.note_gateway(ROOT, None)
        board.note(ROOT, ["a", "b"], {})
        await board.wait(ROOT, ["a", "b"], 10)

    asyncio.run(run())


def test_a_late_host_is_named_with_what_it_cannot_reach() -> None:
    async def run() -> None:
        board = Board()
        board.trouble("a", "cannot reach h3 at 10.0.0.3:1 (refused)")
        board.trouble("b", "cannot reach h3 at 10.0.0.3:1 (refused)")
        board.trouble("b", "")
        with pytest.raises(HostsBehind) as caught:
            await board.wait(ROOT, ["a", "b"], 0.01)
        late = "did not acknowledge it within 0 s"
        assert caught.value.hosts == {"a": f"{late}; it cannot reach h3 at 10.0.0.3:1 (refused)", "b": late}
        board.came("a")
        with pytest.raises(HostsBehind) as caught:
            await board.wait(ROOT, ["a"], 0.01)
        assert caught.value.hosts == {"a": late}

    asyncio.run(run())


def test_one_who_gives_up_waiting_leaves_the_others_waiting() -> None:
    async def run() -> None:
        board = Board()
        impatient = asyncio.ensure_future(board.wait(ROOT, ["a"], 10))
        patient = asyncio.ensure_future(board.wait(ROOT, ["a"], 10))
        await asyncio.sleep(0)
        impatient.cancel()
        await asyncio.wait([impatient])
        assert board.awaited(ROOT)
        board.note(ROOT, ["a"], {})
        await patient

    asyncio.run(run())


def test_what_is_forgotten_or_gone_is_not_ready() -> None:
    board = Board()
    board.note(ROOT, ["a", "b"], {})
    board.gone("a", "its pod was deleted")
    assert board.standing(ROOT).ready == {"b"}
    board.note(ROOT, [], {"b": "lost it"})
    assert board.standing(ROOT).ready == set()
    board.forget(ROOT)
    assert board.standing(ROOT).failed == {}
