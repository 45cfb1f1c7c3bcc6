from __future__ import annotations

import asyncio
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from meshgate_gateway.hosts import worker_versions
from meshgate_gateway.hosts.worker_versions import with_versions
from meshgate_kubernetes.manifests.pods import VERSIONS_PORT_OFFSET, WORKER_BOOTSTRAP
from meshgate_wire.messages import Host
from meshgate_wire.version import monarch_version
from tests.gateway.engine.fakes import async_test
from tests.ports import free_port
from tests.waiting import wait_for


@pytest.fixture
def pod() -> Iterator[Host]:
    """The processes of a pod, on this machine."""
    address = f"tcp://127.0.0.1:{free_port(VERSIONS_PORT_OFFSET)}"
    command = [sys.executable, "-c", WORKER_BOOTSTRAP, address]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        yield Host(name="workers-0", address=address)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@async_test
async def test_a_host_that_reports_nothing_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_versions, "TIMEOUT", 0.2)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(replies.pop())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1] - VERSIONS_PORT_OFFSET
    host = Host(name="workers-0", address=f"tcp://127.0.0.1:{port}")
    replies = [b"", b"HTTP/1.1 400\r\n", b"{}\n", b'{"python":1}\n']
    while replies:
        assert await with_versions(host) == host
    server.close()
    assert await with_versions(host) == host


def test_a_pod_reports_its_versions(pod: Host) -> None:
    def reported() -> Host | None:
        found = asyncio.run(with_versions(pod))
        return None if found == pod else found

    found = wait_for(reported, "the versions of a pod")
    assert found is not None
    assert (found.python, found.monarch) == (platform.python_version(), monarch_version())
