from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from meshgate_sync.transport.connections import Connection
from meshgate_sync.transport.runner import RequestWindow
from tests.sync.runners import RunnerPair
from tests.sync.trees import Content, on_disk, plain

MODEL: dict[bytes, object] = {b"a": b"1", b"large": bytes(range(200))}
ONE, OTHER = b"1" * 32, b"2" * 32
PIECES = {b"%d" % number: 10 for number in range(8)}


async def test_a_host_that_connects_before_the_gateway_is_configured_is_served(tmp_path: Path) -> None:
    content = Content()
    pair = RunnerPair(tmp_path, content)
    await pair.start(gateway_late=True)
    while not pair.gateway._connections._waiting:  # noqa: ASYNC110 - the connection is on its way through the kernel
        await asyncio.sleep(0)
    pair.gateway.configure(None, {})
    tree = content.tree(MODEL)
    pair.publish(tree, striped=True)
    await pair.engine.wait(tree.digest, {"h0"})
    assert on_disk(pair.stores[1].snapshots.path(tree.digest)) == plain(MODEL)
    await pair.close()


def test_reading_pauses_while_the_disk_does_not_keep_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshgate_sync.transport.disk._MAX_PENDING_BYTES", 20)
    pauses: list[str] = []
    for name in ("pause_reading", "resume_reading"):
        original = getattr(Connection, name)

        def spy(self: Connection, original: object = original, name: str = name) -> None:
            pauses.append(name)
            original(self)  # type: ignore[operator]

        monkeypatch.setattr(Connection, name, spy)

    async def run() -> None:
        content = Content()
        pair = RunnerPair(tmp_path, content)
        await pair.start()
        tree = content.tree({b"large": bytes(range(250)) * 4})
        pair.publish(tree)
        await pair.engine.wait(tree.digest, {"h0"})
        await pair.close()

    asyncio.run(run())
    assert "pause_reading" in pauses
    assert pauses[-1] == "resume_reading"


async def test_an_unexpected_error_of_the_store_fails_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = Content()
    pair = RunnerPair(tmp_path, content)
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
    failed = asyncio.Event()
    monkeypatch.setattr(pair.engine, "report_status", lambda root, ready, bad: failed.set() if bad else None)
    await pair.start()
    tree = content.tree(MODEL)

    def fail_unexpectedly(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(pair.host.disk, "add", fail_unexpectedly)
    pair.publish(tree)
    await asyncio.wait_for(failed.wait(), 30)
    assert str(errors[0]) == "a bug"
    await pair.close()


def test_more_is_requested_once_half_of_the_window_has_arrived() -> None:
    window = RequestWindow(40)
    window.add(ONE, PIECES)
    assert window.take() == [(ONE, (b"0", b"1", b"2", b"3"))]
    window.arrived(b"2")
    assert window.take() == []
    window.arrived(b"0")
    assert window.take() == [(ONE, (b"4", b"5"))]
    for digest in PIECES:
        window.arrived(digest)
    assert window.take() == []


def test_a_piece_that_arrived_for_one_version_is_not_requested_for_another() -> None:
    window = RequestWindow(20)
    window.add(ONE, PIECES)
    window.add(OTHER, {b"7": 10, b"6": 10, b"new": 10})
    window.arrived(b"6")
    assert window.take() == [(ONE, (b"0", b"1")), (OTHER, (b"7", b"new"))]


def test_a_version_whose_pieces_never_arrive_delays_no_other() -> None:
    window = RequestWindow(20)
    window.add(ONE, PIECES)
    assert window.take()
    window.add(OTHER, {b"other": 10})
    assert window.take() == [(OTHER, (b"other",))]
    window.forget(ONE)
    for digest in PIECES:
        window.arrived(digest)
    assert window.take() == []
