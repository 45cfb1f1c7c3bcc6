"""Sessions with a stub engine: connections, ends, the reaping of orphaned processes, and what engines report."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn, cast

import pytest

from meshgate_gateway.child_process import ExitStatus
from meshgate_gateway.control import (
    ClientConnected,
    ClientDisconnected,
    ControlMessage,
    EndSession,
    HostLost,
    HostsReply,
    HostsRequest,
    Inspect,
    Inspected,
    JobEnding,
    NewConnection,
    RunEnded,
    SessionNamed,
    SessionState,
)
from meshgate_gateway.hosts.provider import Host, HostProvider, JobEnd, MeshIncomplete, StaticHosts
from meshgate_gateway.sessions import session_manager as module
from meshgate_gateway.sessions.engine_processes import EnginePool
from meshgate_gateway.sessions.session_manager import (
    ConnectRequest,
    EndedSessions,
    SessionInspection,
    SessionManager,
    _silence,
)
from meshgate_gateway.sessions.session_table import Gone, Reject, Sessions
from meshgate_gateway.supervisor.link import SupervisorLink
from meshgate_wire.status import EngineStatus, MeshStatus, PrintedLine, SessionOutput
from tests.gateway.server_process import STUBS, TOKEN, ServerProcess, wait_gone
from tests.gateway.unsupervised import Unsupervised

DIED = Gone("died", "was killed by SIGKILL", "the last words", 3.0)
ENDED = Gone("ended", "the client ended the session", "", 4.0)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--mesh", "workers=ipc:///nowhere/a,ipc:///nowhere/b", "--max-sessions", "64") as server:
        yield server


# --- sessions ---------------------------------------------------------------------------------------------


def test_each_session_has_its_own_engine(server: ServerProcess) -> None:
    one, two = uuid.uuid4().hex, uuid.uuid4().hex
    with server.join(one) as first, server.join(two) as second:
        a, b = first.command("describe"), second.command("describe")
    assert (a["session"], b["session"]) == (one, two)
    assert a["pid"] != b["pid"]


def test_a_new_connection_replaces_the_old_one_at_the_same_engine(server: ServerProcess) -> None:
    session = uuid.uuid4().hex
    with server.join(session) as first:
        before = first.command("describe")
        with server.join(session, resume=True) as second:
            assert second.command("describe")["pid"] == before["pid"]
            assert first.closed_by_peer()


def test_a_session_outlives_its_connection(server: ServerProcess) -> None:
    session = uuid.uuid4().hex
    with server.join(session) as connection:
        pid = connection.command("describe")["pid"]
    server.wait_logged("session disconnected", session=session)
    with server.join(session, resume=True) as connection:
        assert connection.command("describe")["pid"] == pid


def test_resuming_an_unknown_session_is_an_error(server: ServerProcess) -> None:
    answer = server.failed(resume=True)
    assert answer.status == 410
    assert answer.body["kind"] == "unknown"
    assert "restarted" in answer.body["reason"]


def test_the_error_for_a_killed_engine_has_its_last_output(server: ServerProcess) -> None:
    session = uuid.uuid4().hex
    with server.join(session) as connection:
        connection.command("print the last words")
        connection.send(b"kill\n")
        assert connection.closed_by_peer()
    for _ in range(2):
        answer = server.failed(session, resume=True)
        assert answer.status == 410
        assert answer.body["kind"] == "died"
        assert "SIGKILL" in answer.body["reason"]
        assert "the last words" in answer.body["output"]


def test_the_error_for_a_failed_engine_has_its_exit_code(server: ServerProcess) -> None:
    session = uuid.uuid4().hex
    with server.join(session) as connection:
        connection.command("print the last words")
        connection.send(b"exit 7\n")
        assert connection.closed_by_peer()
    ended = server.failed(session, resume=True).body
    assert ended["reason"] == "the session's engine ended with exit code 7"
    assert ended["output"] == "the last words\n"


def test_an_invalid_control_message_ends_only_its_engine(server: ServerProcess) -> None:
    session = uuid.uuid4().hex
    with server.join() as other, server.join(session) as connection:
        connection.send(b"send {}\n")
        assert connection.closed_by_peer()
        ended = server.failed(session, resume=True).body
        assert ended["kind"] == "died"
        assert "could not handle a message of the session's engine: " in ended["reason"]
        assert "type" in ended["reason"]  # what its message lacks
        assert other.command("describe")


def test_a_session_that_ended_in_order_is_gone(server: ServerProcess) -> None:
    session = uuid.uuid4().hex
    with server.join(session) as connection:
        connection.send(b"goodbye\n")
        assert connection.closed_by_peer()
    answer = server.failed(session, resume=True)
    assert (answer.status, answer.body["kind"]) == (410, "ended")
    assert answer.body["output"] == ""


def test_the_children_of_an_engine_exit_with_it(server: ServerProcess) -> None:
    with server.join() as connection:
        pid = connection.command("spawn")["pid"]
        connection.send(b"kill\n")
        assert connection.closed_by_peer()
    wait_gone(pid)


def test_the_engine_receives_its_hosts(server: ServerProcess) -> None:
    with server.join() as connection:
        reply = connection.command("hosts workers")
    assert [host["address"] for host in reply["hosts"]] == ["ipc:///nowhere/a", "ipc:///nowhere/b"]
    assert [host["name"] for host in reply["hosts"]] == ["workers-0", "workers-1"]


def test_the_error_for_an_unknown_mesh_lists_the_known_ones(server: ServerProcess) -> None:
    with server.join() as connection:
        reply = connection.command("hosts trainers")
    assert "'trainers'" in reply["error"]
    assert "workers" in reply["error"]


def test_connections_have_nodelay_set(server: ServerProcess) -> None:
    with server.join() as connection:
        assert connection.command("describe")["nodelay"]


# --- with an engine in this process -----------------------------------------------------------------------


class FakeEngine:
    """An engine process that sends what the test puts into ``messages``."""

    pid, running, adopted = 1, True, False
    owner, meshes, name, run = "", frozenset[str](), "", ""

    def __init__(self) -> None:
        self.session: str | None = None
        self.messages: asyncio.Queue[ControlMessage | None] = asyncio.Queue()
        self.sent: list[ControlMessage] = []
        self.closed = asyncio.Event()

    def set_run(self, run: str) -> None:
        self.run = run

    def set_name(self, name: str) -> None:
        self.name = name

    def close_channel(self) -> None:
        self.closed.set()

    def assign(self, session: str, owner: str, lease: float) -> None:
        self.session = session

    def add_mesh(self, mesh: str) -> None:
        pass

    def forget(self) -> None:
        pass

    def send(self, message: ControlMessage, descriptors: Sequence[int] = ()) -> bool:
        self.sent.append(message)
        if isinstance(message, Inspect):
            body = EngineStatus(version="cafe").model_dump_json()
            self.messages.put_nowait(Inspected(request=message.request, body=body))
        return True

    async def receive(self) -> ControlMessage | None:
        return await self.messages.get()

    async def stop(self, timeout: float) -> ExitStatus:
        return ExitStatus(0, "the last words")

    def kill(self) -> None:
        self.messages.put_nowait(None)


class Managed:
    """A manager with one fake engine, and a client's socket."""

    def __init__(self, hosts: HostProvider) -> None:
        self.engine = FakeEngine()
        self.table = Sessions(lease=60, limit=8, now=0)
        pool = EnginePool(lambda: self.engine, 0)  # type: ignore[arg-type, return-value]
        ended = EndedSessions(cast("SupervisorLink", Unsupervised()))
        self.manager = SessionManager(self.table, pool, hosts, lease=60, reap_command=[], environment={}, ended=ended)
        self.connection, self.client = socket.socketpair()
        self.request = ConnectRequest("0" * 32, "owner", resume=False, head=b"")

    async def close(self) -> None:
        await self.manager.close("the test is over")
        self.connection.close()
        self.client.close()


@asynccontextmanager
async def managed(hosts: HostProvider | None = None) -> AsyncIterator[Managed]:
    with_fake = Managed(hosts or StaticHosts({}))
    try:
        yield with_fake
    finally:
        await with_fake.close()


async def test_a_message_that_the_manager_cannot_handle_ends_its_session_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    async with managed() as with_fake:
        monkeypatch.setattr(with_fake.table, "add_mesh", fail)
        with_fake.engine.messages.put_nowait(HostsRequest(mesh="workers"))
        for _ in range(2):
            gone = await with_fake.manager.connect(with_fake.request, with_fake.connection)
            assert isinstance(gone, Gone)
            assert (gone.kind, gone.output) == ("died", "the last words")
            assert "ZeroDivisionError('a bug')" in gone.reason


class HangingHosts(StaticHosts):
    def __init__(self) -> None:
        super().__init__({})
        self.asked: list[str] = []
        self.cancelled: list[str] = []

    async def hosts(self, mesh: str) -> NoReturn:
        self.asked.append(mesh)
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.append(mesh)
        raise AssertionError


async def test_what_still_looks_for_hosts_at_the_end_is_cancelled_in_order() -> None:
    hosts, names = HangingHosts(), [f"mesh{number}" for number in range(64)]
    async with managed(hosts) as with_fake:
        for name in names:
            with_fake.engine.messages.put_nowait(HostsRequest(mesh=name))
        with_fake.engine.messages.put_nowait(None)  # the session ends
        await with_fake.manager.connect(with_fake.request, with_fake.connection)
        assert hosts.asked == names
    await asyncio.sleep(0)
    assert hosts.cancelled == names


async def test_the_server_does_not_respond_on_a_connection_that_an_engine_may_have_taken() -> None:
    async with managed() as with_fake:
        connecting = with_fake.manager.connect(with_fake.request, with_fake.connection)
        assert await asyncio.wait_for(connecting, 0.05) is None
        assert any(isinstance(message, NewConnection) for message in with_fake.engine.sent)


async def test_the_channel_of_an_engine_that_does_not_end_is_closed_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    for timeout in ("STOP_TIMEOUT", "EXIT_TIMEOUT"):
        monkeypatch.setattr(f"meshgate_gateway.sessions.session_manager.{timeout}", 0.01)
    monkeypatch.setattr(FakeEngine, "kill", lambda engine: None)
    async with managed() as with_fake:
        with_fake.engine.messages.put_nowait(ClientConnected())
        await with_fake.manager.connect(with_fake.request, with_fake.connection)
        await with_fake.manager.close("the test is over")
        await with_fake.engine.closed.wait()


async def test_an_engine_whose_hosts_cannot_be_found_gets_the_reason() -> None:
    class Broken(StaticHosts):
        async def hosts(self, mesh: str) -> tuple[Host, ...]:
            raise ZeroDivisionError("a bug")

    async with managed(Broken({})) as with_fake:
        with_fake.engine.messages.put_nowait(HostsRequest(mesh="workers"))
        with_fake.engine.messages.put_nowait(ClientConnected())
        assert await with_fake.manager.connect(with_fake.request, with_fake.connection) is None
        (reply,) = (sent for sent in with_fake.engine.sent if isinstance(sent, HostsReply))
        assert "ZeroDivisionError('a bug')" in str(reply.error)


async def test_an_engine_learns_of_lost_hosts_before_it_gets_those_of_their_mesh() -> None:
    class Incomplete(StaticHosts):
        async def hosts(self, mesh: str) -> tuple[Host, ...]:
            raise MeshIncomplete("a is lost", await super().hosts(mesh), {"workers-0": "OOMKilled"})

    async with managed(Incomplete({"workers": ["tcp://10.0.0.1:1", "tcp://10.0.0.2:1"]})) as with_fake:
        with_fake.engine.messages.put_nowait(HostsRequest(mesh="workers"))
        with_fake.engine.messages.put_nowait(ClientConnected())
        assert await with_fake.manager.connect(with_fake.request, with_fake.connection) is None
        lost, reply = (sent for sent in with_fake.engine.sent if isinstance(sent, (HostLost, HostsReply)))
        assert lost == HostLost(mesh="workers", host="workers-0", reason="OOMKilled")
        assert isinstance(reply, HostsReply)
        assert ([host.name for host in reply.hosts], reply.error) == (["workers-0", "workers-1"], None)


@pytest.mark.parametrize("all_lost", [True, False])
async def test_an_engine_learns_whether_a_lost_host_was_the_last_of_the_job(all_lost: bool) -> None:
    class Hosts(StaticHosts):
        def all_lost(self) -> bool:
            return all_lost

    async with managed(Hosts({"workers": ["tcp://10.0.0.1:1"]})) as with_fake:
        with_fake.engine.messages.put_nowait(HostsRequest(mesh="workers"))
        with_fake.engine.messages.put_nowait(ClientConnected())
        assert await with_fake.manager.connect(with_fake.request, with_fake.connection) is None
        with_fake.manager.host_lost("workers", "workers-0", "it ended")
        (lost,) = (sent for sent in with_fake.engine.sent if isinstance(sent, HostLost))
        assert lost.last == all_lost
        with_fake.manager.host_lost("workers", "workers-0", "the mesh was scaled", removed=True)
        assert not [sent for sent in with_fake.engine.sent if isinstance(sent, HostLost)][-1].last


async def test_a_lease_that_began_under_an_earlier_server_counts_on() -> None:
    async with managed() as with_fake:
        with_fake.engine.adopted, with_fake.engine.owner, with_fake.engine.meshes = True, "owner", frozenset()
        with_fake.manager.adopt(with_fake.engine, "0" * 32)  # type: ignore[arg-type]
        assert with_fake.table.next_expiry() is None
        with_fake.manager.changed.clear()
        with_fake.engine.messages.put_nowait(SessionState(connected=False, disconnected_for=50))
        await with_fake.manager.changed.wait()
        left = (with_fake.table.next_expiry() or 0) - asyncio.get_running_loop().time()
        assert left <= 10


async def test_an_adopted_engine_that_has_ended_in_order_did_not_die() -> None:
    async with managed() as with_fake:
        with_fake.engine.adopted, with_fake.engine.owner, with_fake.engine.meshes = True, "owner", frozenset()
        with_fake.manager.adopt(with_fake.engine, "0" * 32)  # type: ignore[arg-type]
        with_fake.engine.kill()
        await asyncio.wait(with_fake.manager._serving.values())
        assert with_fake.table.gone["0" * 32].kind == "ended"


async def test_an_engine_is_part_of_the_status_until_it_has_exited() -> None:
    async with managed() as with_fake:
        with_fake.engine.messages.put_nowait(ClientConnected())
        assert await with_fake.manager.connect(with_fake.request, with_fake.connection) is None
        (session,) = (await with_fake.manager.inspection.status()).sessions
        assert (session.session, session.version, session.problem) == ("0" * 32, "cafe", "")
        with_fake.engine.kill()
        await asyncio.wait(with_fake.manager._serving.values())
        assert (await with_fake.manager.inspection.status()).sessions == ()


def test_an_ended_session_is_kept_once_and_until_it_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Unsupervised()
    ended = EndedSessions(cast("SupervisorLink", supervisor))
    ended.update({"a": DIED})
    with monkeypatch.context() as patch:
        patch.setattr(supervisor, "keep", None)  # is not called
        ended.update({"a": DIED})
    ended.update({"b": ENDED})
    assert EndedSessions(cast("SupervisorLink", supervisor)).restore() == {"b": ENDED}


# --- settings that need a server of their own -------------------------------------------------------------


def test_a_session_expires_a_lease_after_its_connection() -> None:
    session = uuid.uuid4().hex
    with ServerProcess("--lease", "6") as server:
        with server.join(session) as connection:
            described = connection.command("describe")
            assert described["lease"] == 6
            pid = described["pid"]
        server.wait_logged("session ended", session=session, kind="expired")
        wait_gone(pid)


def test_its_owner_ends_a_session_that_another_program_holds() -> None:
    session, other = uuid.uuid4().hex, uuid.uuid4().hex
    with ServerProcess() as server, server.join(session) as connection, server.join(other) as another:
        pid = connection.command("describe")["pid"]
        for _ in range(2):  # ending it again does nothing
            answer = server.ask(f"/v1/sessions/{session}/end", method="POST", token=TOKEN)
            assert (answer.status, answer.body) == (200, {"session": session})
        wait_gone(pid)
        assert connection.closed_by_peer()
        server.wait_logged("audit", action="end session", outcome="allowed", session=session, caller="job")
        gone = server.failed(session, resume=True)
        assert (gone.status, gone.body["kind"]) == (410, "ended")
        assert gone.body["reason"] == "another program ended it"
        assert another.command("describe")["session"] == other


def test_a_session_is_not_ended_by_a_request_that_must_not() -> None:
    session, unknown = uuid.uuid4().hex, uuid.uuid4().hex
    with ServerProcess() as server, server.join(session) as connection:
        assert server.ask(f"/v1/sessions/{session}/end", method="POST", token="wrong").status == 401
        assert server.ask(f"/v1/sessions/{session}/end", token=TOKEN).status == 404
        assert server.ask(f"/v1/sessions/{session}", method="POST", token=TOKEN).status == 405
        missing = server.ask(f"/v1/sessions/{unknown}/end", method="POST", token=TOKEN)
        assert (missing.status, missing.body["kind"]) == (410, "unknown")
        server.wait_logged("audit", action="end session", outcome="refused", session=unknown)
        assert connection.command("describe")["pid"]


async def test_the_end_of_the_job_is_reported_to_all_sessions_also_those_that_begin_later() -> None:
    async with managed() as with_fake:
        with_fake.engine.owner, with_fake.engine.meshes = "alice", frozenset()
        with_fake.manager.job_ending(JobEnd("its time limit", time.time() + 60, "a line"))
        with_fake.manager.adopt(with_fake.engine, "0" * 32)  # type: ignore[arg-type]
        with_fake.manager.job_ending(None)
        with_fake.manager.job_ending(JobEnd("its time limit", time.time() - 1, "another line"))
        first, withdrawn, last = with_fake.engine.sent
        assert isinstance(first, JobEnding)
        assert (first.reason, first.notice) == ("its time limit", "a line")
        assert 0 < (first.seconds or 0) <= 60
        assert withdrawn == JobEnding()
        assert last == JobEnding(reason="its time limit", seconds=0.0, notice="another line")


async def test_only_the_identity_of_a_session_ends_it() -> None:
    async with managed() as with_fake:
        with_fake.engine.owner, with_fake.engine.meshes = "alice", frozenset()
        with_fake.manager.adopt(with_fake.engine, "0" * 32)  # type: ignore[arg-type]
        refused = with_fake.manager.end("0" * 32, "bob", "no reason")
        assert isinstance(refused, Reject)
        assert refused.forbidden
        assert not with_fake.engine.sent
        ending = with_fake.manager.end("0" * 32, "alice", "a reason")
        assert isinstance(ending, asyncio.Task)
        assert [type(message) for message in with_fake.engine.sent] == [EndSession]
        with_fake.engine.kill()
        await ending
        assert with_fake.manager.end("0" * 32, "alice", "another reason") is None
        assert with_fake.table.gone["0" * 32].reason == "a reason"


async def test_the_sessions_of_a_run_end_with_it_unless_they_are_detached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STOP_TIMEOUT", 0.01)
    async with managed() as with_fake:
        manager, engine = with_fake.manager, with_fake.engine
        engine.messages.put_nowait(ClientConnected(run="night"))
        await manager.connect(with_fake.request, with_fake.connection)
        assert manager.run_ended("day") == []
        (ending,) = manager.run_ended("night")
        engine.messages.put_nowait(SessionNamed(name="kept"))  # was on its way
        await asyncio.sleep(0.05)
        assert not ending.done()
        assert manager.run_ended("night") == []
        engine.name = ""
        assert manager.run_ended("night") == [ending]
        await ending  # the engine does not end by itself: it is killed
        assert "the session's engine did not respond" in with_fake.table.gone["0" * 32].reason
        assert [message.run for message in engine.sent if isinstance(message, RunEnded)] == ["day", *["night"] * 3]


def test_the_number_of_sessions_is_limited() -> None:
    with ServerProcess("--max-sessions", "1") as server, server.join():
        answer = server.failed()
        assert answer.status == 503
        assert "--max-sessions" in answer.error


def test_an_engine_that_fails_on_startup_is_reported_on_the_first_connection() -> None:
    with ServerProcess(environment={"STUB_ENGINE": "crash"}) as server:
        answer = server.failed()
        assert answer.status == 410
        assert answer.body["kind"] == "died"
        assert "this stub crashes on startup" in answer.body["output"]


def test_an_engine_that_dies_during_the_handover_is_reported_on_that_connection() -> None:
    with ServerProcess(environment={"STUB_ENGINE": "mute"}) as server, server.dial() as connection:
        started = server.wait_logged("session started")
        os.kill(started["pid"], signal.SIGKILL)
        assert "SIGKILL" in connection.http().body["reason"]


def test_sessions_work_without_prestarted_engines() -> None:
    with ServerProcess("--warm-engines", "0") as server, server.join() as connection:
        assert connection.command("describe")


LOG_ON_FULL_DISK = """
import os, runpy, sys
os.dup2(os.open('/dev/full', os.O_WRONLY), 2)
sys.path[0] = os.getcwd()
runpy.run_path(sys.argv.pop(1), run_name='__main__')
"""


def test_a_full_log_disk_breaks_no_session() -> None:
    session = uuid.uuid4().hex
    with ServerProcess(program=("-c", LOG_ON_FULL_DISK, str(STUBS))) as server:
        with server.join(session) as connection:
            pid = connection.command("describe")["pid"]
        with server.join(session, resume=True) as connection:
            assert connection.command("describe")["pid"] == pid
            connection.command("print the last words")
            connection.send(b"kill\n")
            assert connection.closed_by_peer()
        gone = server.failed(session, resume=True).body
        assert (gone["kind"], gone["output"]) == ("died", "the last words\n")


# --- reaping ----------------------------------------------------------------------------------------------

MESH = "workers=ipc:///nowhere/a,ipc:///nowhere/b"
ADDRESSES = ["ipc:///nowhere/a", "ipc:///nowhere/b"]
REAPED = "orphaned processes reaped"


def reaped(path: Path) -> list[list[str]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_the_hosts_of_a_dead_session_are_reaped(tmp_path: Path) -> None:
    target = tmp_path / "reaped"
    with ServerProcess("--mesh", MESH, environment={"STUB_REAPED": str(target)}) as server:
        with server.join() as connection:
            connection.command("hosts workers")
            connection.send(b"kill\n")
            server.wait_logged(REAPED, meshes=["workers"])
        assert reaped(target) == [ADDRESSES]


def test_thousands_of_hosts_are_reaped_together(tmp_path: Path) -> None:
    target = tmp_path / "reaped"
    meshes = {f"m{mesh}": [f"ipc:///nowhere/at/all/{mesh}/{host:030}" for host in range(1000)] for mesh in range(4)}
    flags = [flag for mesh, hosts in meshes.items() for flag in ("--mesh", f"{mesh}={','.join(hosts)}")]
    with ServerProcess(*flags, environment={"STUB_REAPED": str(target)}) as server, server.join() as connection:
        for mesh, hosts in meshes.items():
            known = len(connection.command(f"hosts {mesh}")["hosts"])
            while known < len(hosts):
                known += len(connection.answer()["hosts"])
        connection.send(b"kill\n")
        server.wait_logged(REAPED)
    (addresses,) = reaped(target)
    assert sorted(addresses) == sorted(host for hosts in meshes.values() for host in hosts)


def test_hosts_are_reaped_once_no_other_session_uses_them(tmp_path: Path) -> None:
    target = tmp_path / "reaped"
    with ServerProcess("--mesh", MESH, environment={"STUB_REAPED": str(target)}) as server:
        other = server.join()
        other.command("hosts workers")
        session = uuid.uuid4().hex
        with server.join(session) as connection:
            connection.command("hosts workers")
            connection.send(b"kill\n")
            server.wait_logged("session ended", session=session)
        assert other.command("describe")
        assert reaped(target) == []
        other.send(b"goodbye\n")
        server.wait_logged(REAPED)
        assert reaped(target) == [ADDRESSES]
        other.close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_a_session_gets_its_hosts_once_every_reaper_of_the_mesh_is_done(
    monkeypatch: pytest.MonkeyPatch, order: tuple[int, int]
) -> None:
    async with managed(StaticHosts({"workers": ("ipc:///nowhere/a",)})) as with_fake:
        reapers = [asyncio.get_running_loop().create_future() for _ in order]
        started = iter(reapers)
        monkeypatch.setattr(with_fake.manager, "_run_reaper", lambda meshes, hosts: asyncio.wait([next(started)]))
        for _ in reapers:
            with_fake.manager._reap(frozenset({"workers"}))
        with_fake.engine.messages.put_nowait(ClientConnected())
        await with_fake.manager.connect(with_fake.request, with_fake.connection)
        with_fake.engine.messages.put_nowait(HostsRequest(mesh="workers"))
        for number in order:
            assert not [each for each in with_fake.engine.sent if isinstance(each, HostsReply)]
            reapers[number].set_result(None)
            for _ in range(20):  # whatever is due happens now
                await asyncio.sleep(0)
        assert [each for each in with_fake.engine.sent if isinstance(each, HostsReply)]
        assert not with_fake.manager._reaping


def test_a_session_that_ended_in_order_or_used_no_hosts_needs_no_reaping(tmp_path: Path) -> None:
    target = tmp_path / "reaped"
    with ServerProcess("--mesh", MESH, environment={"STUB_REAPED": str(target)}) as server:
        orderly, hostless = uuid.uuid4().hex, uuid.uuid4().hex
        with server.join(orderly) as connection:
            connection.command("hosts workers")
            connection.send(b"goodbye\n")
            server.wait_logged("session ended", session=orderly)
        with server.join(hostless) as connection:
            connection.send(b"kill\n")
            server.wait_logged("session ended", session=hostless)
    assert reaped(target) == []


def test_a_detached_session_keeps_its_whole_lease_however_its_driver_ended() -> None:
    assert _silence(ClientDisconnected(silence=2.0)) == 2.0
    assert _silence(ClientDisconnected(silence=2.0, detached=True)) == math.inf
    assert _silence(SessionState(connected=False, silence=2.0, detached=True)) == math.inf


def test_what_one_server_keeps_the_next_restores() -> None:
    supervisor = cast("SupervisorLink", Unsupervised())
    ended = EndedSessions(supervisor)
    assert ended.restore() == {}
    ended.update({"a": DIED})
    ended.update({"a": DIED, "b": ENDED})
    assert EndedSessions(supervisor).restore() == {"a": DIED, "b": ENDED}


def test_what_the_table_forgets_is_dropped() -> None:
    supervisor = cast("SupervisorLink", Unsupervised())
    EndedSessions(supervisor).update({"a": DIED, "b": ENDED})
    EndedSessions(supervisor).update({"b": ENDED})
    assert EndedSessions(supervisor).restore() == {"b": ENDED}


class Engine:
    """Answers in parts, unless ``mute``; ``exits`` is called when it is asked."""

    def __init__(
        self,
        answer: EngineStatus | SessionOutput | None = None,
        *,
        mute: bool = False,
        exits: Callable[[], None] = lambda: None,
    ) -> None:
        self.pid, self.answer, self.mute, self.exits = 7, answer or EngineStatus(), mute, exits
        self.asked: list[Inspect] = []
        self.inspection: SessionInspection

    def send(self, message: ControlMessage) -> bool:
        assert isinstance(message, Inspect)
        self.asked.append(message)
        self.exits()
        body = self.answer.model_dump_json()
        for part, more in ((body[:10], True), (body[10:], False)) if not self.mute else ():
            self.inspection.received(Inspected(request=message.request, body=part, more=more))
        return True


def inspect(**engines: Engine) -> SessionInspection:
    table = Sessions(lease=60, limit=8, now=0)
    for name in engines:
        table.admit(name, "alice", resume=False, now=0)
    table.connected(next(iter(engines)), 0.0)
    inspection = SessionInspection(table, engines, StaticHosts({"workers": ["tcp://a", "tcp://b"]}), lease=60)
    for engine in engines.values():
        engine.inspection = inspection
    return inspection


def test_the_status_has_the_hosts_and_what_each_engine_knows() -> None:
    mesh = MeshStatus(kind="procs", name="procs", sizes={"hosts": 2})
    inspection = inspect(
        one=Engine(EngineStatus(name="train", version="cafe", meshes=(mesh,))), two=Engine(EngineStatus())
    )
    status = asyncio.run(inspection.status())
    assert status.meshes == {"workers": 2}
    assert [(host.name, host.rank) for host in status.hosts] == [("workers-0", 0), ("workers-1", 1)]
    one, two = status.sessions
    assert (one.session, one.owner, one.connected, one.pid, one.version) == ("one", "alice", True, 7, "cafe")
    assert (one.name, one.meshes) == ("train", (mesh,))
    assert not two.connected


def test_hosts_keep_their_ranks_in_the_status_when_another_is_lost() -> None:
    class Hosts(StaticHosts):
        def present(self, mesh: str) -> Mapping[int, Host]:
            return {rank: host for rank, host in super().present(mesh).items() if rank}

    hosts = Hosts({"workers": ["tcp://a", "tcp://b"]})
    status = asyncio.run(SessionInspection(Sessions(lease=60, limit=8, now=0), {}, hosts, lease=60).status())
    assert [(host.name, host.rank) for host in status.hosts] == [("workers-1", 1)]


def test_an_engine_that_does_not_answer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DESCRIBE_TIMEOUT", 0.01)
    inspection = inspect(one=Engine(EngineStatus(), mute=True), two=Engine(EngineStatus(version="cafe")))
    one, two = asyncio.run(inspection.status()).sessions
    assert one.problem == "its engine did not answer within 0.01 s"
    assert (two.problem, two.version) == ("", "cafe")
    inspection.received(Inspected(request=1, body="{}"))  # a late answer


async def test_the_list_has_the_sessions_of_its_caller_and_why_an_engine_did_not_answer() -> None:
    def exit_another() -> None:
        del engines["unasked"]

    asked = Engine(mute=True, exits=lambda: inspection.exited("asked"))
    inspection = inspect(one=Engine(SessionOutput(last=8), exits=exit_another), asked=asked, unasked=Engine())
    engines = cast("dict[str, Engine]", inspection._engines)
    one, *others = await inspection.sessions("alice")
    assert (one["id"], one["connected"], one["lease"], one["last"]) == ("one", True, 60, 8)
    assert [(each["id"], each["connected"], each["error"]) for each in others] == [
        ("asked", False, "its engine has exited"),
        ("unasked", False, "its engine has exited"),
    ]
    assert await inspection.sessions("bob") == []


async def test_a_session_has_its_name_although_its_engine_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DESCRIBE_TIMEOUT", 0.01)
    inspection = inspect(one=Engine(mute=True))
    inspection._sessions.named("one", "night")
    (listed,) = await inspection.sessions("alice")
    assert (listed["name"], listed["detached"]) == ("night", True)
    assert listed["error"] == "its engine did not answer within 0.01 s"
    assert (await inspection.status()).sessions[0].name == "night"


def test_an_engine_that_was_killed_while_no_driver_was_connected_leaves_its_reason_under_its_name(
    server: ServerProcess,
) -> None:
    session = uuid.uuid4().hex
    with server.join(session) as connection:
        connection.command("detach night")
        connection.command("print the last words")
        pid = connection.command("describe")["pid"]
    server.wait_logged("session disconnected", session=session)
    os.kill(pid, signal.SIGKILL)
    server.wait_logged("session ended", session=session)
    (ended,) = [each for each in server.ask("/v1/sessions", token=TOKEN).body["ended"] if each["id"] == session]
    assert (ended["name"], ended["kind"], ended["output"]) == ("night", "died", "the last words\n")
    assert ended["reason"] == "the session's engine was killed by SIGKILL"
    assert 0 <= ended["ago"] < 60


def test_output_of_an_engine_that_does_not_answer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DESCRIBE_TIMEOUT", 0.01)
    page = asyncio.run(inspect(one=Engine(mute=True), two=Engine(SessionOutput(last=8))).output({}))
    assert [(each.session, each.last, each.problem) for each in page.sessions] == [
        ("one", 0, "its engine did not answer within 0.01 s"),
        ("two", 8, ""),
    ]


def test_output_begins_after_the_lines_that_the_caller_has() -> None:
    line = PrintedLine(number=8, stream="stdout", mesh="m", ranks=(0,), count=1, host="h", text="hello", end="\n")
    one, two = Engine(SessionOutput(lines=(line,), last=8)), Engine(SessionOutput())
    page = asyncio.run(inspect(one=one, two=two).output({"one": 7}))
    assert [(each.session, each.lines) for each in page.sessions] == [("one", (line,)), ("two", ())]
    assert [engine.asked[0].after for engine in (one, two)] == [7, 0]
