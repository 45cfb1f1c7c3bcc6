"""Real worker hosts as local processes, from start to cleanup."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from meshgate_gateway.hosts.local import LocalHosts
from meshgate_gateway.hosts.provider import HostsUnavailable, MeshIncomplete
from meshgate_gateway.supervisor.link import SupervisorLink
from tests.gateway.server_process import TOKEN, ServerProcess, wait_gone
from tests.gateway.unsupervised import Unsupervised


@asynccontextmanager
async def with_hosts(environment: Mapping[str, str] = os.environ, **meshes: int) -> AsyncIterator[LocalHosts]:
    supervisor = Unsupervised()
    hosts = LocalHosts(meshes, environment, cast("SupervisorLink", supervisor))
    try:
        yield hosts
    finally:
        await hosts.close()
        supervisor.close()


def pids(hosts: LocalHosts, mesh: str) -> list[int]:
    return [host.child.pid for host in hosts._meshes[mesh]]


def sockets(addresses: list[str]) -> list[Path]:
    return [Path(address.removeprefix("ipc://")) for address in addresses]


async def test_hosts_are_returned_when_they_are_ready() -> None:
    async with with_hosts(workers=2, others=1) as hosts:
        assert hosts.meshes() == {"workers": 2, "others": 1}
        assert not hosts.present("workers")
        assert not hosts.all_lost()  # they still start
        found = await hosts.hosts("workers")
        assert [host.name for host in found] == ["workers-0", "workers-1"]
        assert all(path.is_socket() for path in sockets([host.address for host in found]))
        assert hosts.present("workers") == dict(enumerate(found))


async def test_close_leaves_no_process_and_no_file() -> None:
    async with with_hosts(workers=1) as hosts:
        (host,) = await hosts.hosts("workers")
        await hosts.close()
        wait_gone(*pids(hosts, "workers"))
        assert not sockets([host.address])[0].parent.exists()


async def test_close_stops_hosts_that_are_still_starting() -> None:
    async with with_hosts(workers=2) as hosts:
        await hosts.close()
        wait_gone(*pids(hosts, "workers"))


async def test_a_mesh_with_a_dead_host_is_unavailable_with_the_reason() -> None:
    async with with_hosts(workers=2) as hosts:
        first, second = await hosts.hosts("workers")
        os.kill(pids(hosts, "workers")[0], signal.SIGKILL)
        while len(hosts.present("workers")) == 2:
            await asyncio.wait(list(hosts._tasks), timeout=1, return_when=asyncio.FIRST_COMPLETED)
        assert hosts.present("workers") == {1: second}
        assert not hosts.all_lost()
        with pytest.raises(
            MeshIncomplete, match=r"workers-0 \(pid \d+\) was killed by SIGKILL; end this job"
        ) as caught:
            await hosts.hosts("workers")
        assert caught.value.hosts == (first, second)
        assert caught.value.lost == {"workers-0": f"the host (pid {pids(hosts, 'workers')[0]}) was killed by SIGKILL"}


async def test_a_host_that_exits_is_reported_lost_with_its_last_output() -> None:
    async with with_hosts(workers=1) as hosts:
        await hosts.hosts("workers")
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        hosts.watch(lambda mesh, host, reason: lost.set_result(reason), lambda *restored: None)
        os.kill(pids(hosts, "workers")[0], signal.SIGTERM)
        assert (await lost).endswith("exit code 0. Its last output: meshgate_worker workers-0: ended: SIGTERM")
        assert hosts.all_lost()
        with pytest.raises(HostsUnavailable, match=r"Its last output: .*SIGTERM") as caught:
            await hosts.hosts("workers")
        assert not isinstance(caught.value, MeshIncomplete)  # none is left


async def test_a_host_that_fails_to_start_is_reported_with_its_last_output() -> None:
    async with with_hosts({**os.environ, "PYTHONPATH": "", "PYTHONHOME": "/nowhere"}, workers=1) as hosts:
        with pytest.raises(HostsUnavailable, match="Its last output: "):
            await hosts.hosts("workers")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_hosts_exit_with_the_gateway_however_it_ends(signum: signal.Signals) -> None:
    with ServerProcess("--local-mesh", "workers=2", "--log-level", "debug") as server:
        ready = [server.wait_logged("host ready", host=f"workers-{rank}") for rank in range(2)]
        assert server.ask("/v1/job", token=TOKEN).body["meshes"] == {"workers": 2}
        server.process.send_signal(signum)
        server.wait()
        wait_gone(*(host["pid"] for host in ready))
        assert not sockets([host["address"] for host in ready])[0].parent.exists()


def test_a_killed_host_is_logged_with_the_reason() -> None:
    with ServerProcess("--local-mesh", "workers=1", "--log-level", "debug") as server:
        host = server.wait_logged("host ready")
        with server.join() as connection:
            assert connection.command("hosts workers")["hosts"][0]["address"] == host["address"]
            os.kill(host["pid"], signal.SIGKILL)
            server.wait_logged("host ended", host="workers-0", reason="was killed by SIGKILL")
            assert "was killed by SIGKILL" in connection.command("hosts workers")["error"]
    assert json.loads(server.log.splitlines()[-1])["event"] == "shut down"
