"""The processes of a session that died are reaped: as soon as no other session uses their hosts."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

from tests.gateway.server_process import ServerProcess

MESH = "workers=ipc:///nowhere/a,ipc:///nowhere/b"
ADDRESSES = ["ipc:///nowhere/a", "ipc:///nowhere/b"]
REAPED = "a dead session's processes are reaped"


def reaped(path: Path) -> list[list[str]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_dead_sessions_hosts_are_reaped(tmp_path: Path) -> None:
    target = tmp_path / "reaped"
    with ServerProcess("--mesh", MESH, environment={"STUB_REAPED": str(target)}) as server:
        with server.join() as connection:
            connection.command("hosts workers")
            connection.send(b"kill\n")
            server.wait_logged(REAPED, meshes=["workers"])
        assert reaped(target) == [ADDRESSES]


def test_the_hosts_of_thousands_are_reaped_at_once(tmp_path: Path) -> None:
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


def test_hosts_that_another_session_uses_wait_for_its_end(tmp_path: Path) -> None:
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


def test_a_session_that_ended_in_order_or_used_no_hosts_leaves_nothing_to_reap(tmp_path: Path) -> None:
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
