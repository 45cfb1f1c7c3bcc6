"""The pool of prestarted engines, with stub engines."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from meshgate_gateway.control import AssignSession, EndSession, HostsReply, SessionEnded
from meshgate_gateway.sessions import engine_processes
from meshgate_gateway.sessions.engine_processes import EnginePool, EngineProcess
from meshgate_gateway.supervisor.link import SupervisorLink
from tests.gateway.server_process import wait_gone
from tests.gateway.unsupervised import Unsupervised

DEADLINE = 60.0
STUB = [sys.executable, str(Path(__file__).parents[1] / "stub_engine.py")]


@asynccontextmanager
async def with_pool(*, size: int) -> AsyncIterator[EnginePool]:
    supervisor = cast("SupervisorLink", Unsupervised())
    pool = EnginePool(lambda: EngineProcess.start(supervisor, STUB, os.environ), size)
    pool.fill()
    try:
        yield pool
    finally:
        await pool.close()


def idle_pids(pool: EnginePool) -> list[int]:
    return [engine.pid for engine in pool._idle]


async def test_a_prestarted_engine_is_acquired() -> None:
    async with with_pool(size=1) as pool:
        (pid,) = idle_pids(pool)
        engine = pool.acquire()
        assert (engine.pid, idle_pids(pool)) == (pid, [])
        await engine.stop(0)


async def test_an_empty_pool_starts_a_new_engine() -> None:
    async with with_pool(size=0) as pool:
        engine = pool.acquire()
        assert engine.running
        await engine.stop(0)
        assert not engine.running


async def kill(engine: EngineProcess) -> None:
    os.kill(engine.pid, signal.SIGKILL)
    while await engine.receive() is not None:
        continue
    await engine.stop(DEADLINE)


async def test_a_dead_engine_is_not_acquired() -> None:
    async with with_pool(size=1) as pool:
        (dead,) = pool._idle
        await kill(dead)
        engine = pool.acquire()
        assert engine.running
        await engine.stop(0)


@pytest.mark.parametrize("refills", [True, False])
async def test_a_pool_starts_another_engine_after_a_session_has_taken_one_if_it_refills(
    refills: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_processes, "REFILL_DELAY", 0)

    async with with_pool(size=1) as pool:
        pool.refills = refills
        engine = pool.acquire()
        await asyncio.sleep(0.01)  # a timer that is due later: the delay is over
        assert len(idle_pids(pool)) == int(refills)
        await engine.stop(0)


async def test_fill_replaces_dead_engines() -> None:
    async with with_pool(size=2) as pool:
        dead, alive = pool._idle
        await kill(dead)
        pool.fill()
        assert alive.pid in idle_pids(pool)
        assert dead.pid not in idle_pids(pool)
        assert len(idle_pids(pool)) == 2


async def test_the_channel_of_an_engine_that_died_unused_is_closed() -> None:
    async with with_pool(size=1) as pool:
        (dead,) = pool._idle
        os.kill(dead.pid, signal.SIGKILL)
        await asyncio.wait_for(dead._child.wait(), DEADLINE)
        pool.fill()
        assert dead not in pool._idle
        assert dead._channel is not None
        assert dead._channel.closed


async def test_close_kills_the_prestarted_engines() -> None:
    async with with_pool(size=2) as pool:
        pids = idle_pids(pool)
        await pool.close()
        wait_gone(*pids)


async def test_messages_pass_in_both_directions() -> None:
    async with with_pool(size=1) as pool:
        engine = pool.acquire()
        assert engine.send(AssignSession(session="0" * 32, lease=1))
        assert engine.send(EndSession(reason="done"))
        assert await engine.receive() == SessionEnded(reason="done")
        assert await engine.receive() is None
        assert (await engine.stop(DEADLINE)).code == 0
        assert not engine.send(HostsReply(mesh="workers"))


async def test_a_further_server_learns_what_is_known_of_the_session() -> None:
    supervisor = Unsupervised()
    engine = EngineProcess.start(cast("SupervisorLink", supervisor), STUB, os.environ)
    (process,) = supervisor.children.values()
    engine.assign("0" * 32, "owner", 60)
    assigned = process.note
    engine.add_mesh("workers")
    engine.set_name("train")
    engine.set_run("night")
    await engine.stop(0)
    assert assigned == {"session": "0" * 32, "owner": "owner", "meshes": [], "name": "", "run": ""}
    assert process.note == {**assigned, "meshes": ["workers"], "name": "train", "run": "night"}


async def test_a_missing_program_raises() -> None:
    with pytest.raises(FileNotFoundError):
        EngineProcess.start(cast("SupervisorLink", Unsupervised()), ["/nowhere/at/all"], os.environ)


def test_an_engine_gets_the_descriptor_for_output() -> None:
    reading, writing = os.pipe()

    async def run() -> None:
        program = "import os, sys; os.write(int(sys.argv[sys.argv.index('--output-fd') + 1]), b'printed')"
        supervisor = cast("SupervisorLink", Unsupervised())
        engine = EngineProcess.start(supervisor, [sys.executable, "-c", program], os.environ, writing)
        assert (await engine.stop(DEADLINE)).code == 0

    asyncio.run(run())
    os.close(writing)
    with open(reading, "rb") as file:
        assert file.read() == b"printed"
