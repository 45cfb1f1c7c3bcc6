from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from meshgate_sync.transport.tcp import Connection
from tests.sync.runners import RunnerPair
from tests.sync.trees import Content, on_disk, plain

MODEL: dict[bytes, object] = {b"a": b"1", b"large": bytes(range(200))}


def test_a_host_that_connects_before_the_gateway_is_configured_is_served(tmp_path: Path) -> None:
    async def run() -> None:
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

    asyncio.run(run())


def test_reading_pauses_while_the_disk_does_not_keep_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshgate_sync.transport.store_thread._MAX_PENDING_BYTES", 20)
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


def test_an_unexpected_error_of_the_store_fails_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
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

    asyncio.run(run())
