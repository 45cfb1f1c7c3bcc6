"""On real hosts: what a dead client left is killed, and the hosts stay usable."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile

import pytest

from tests.gateway.server_process import wait_gone
from tests.worker_image.host_process import DEADLINE, IDENTITY, Client, Worker


def reap_orphans(*addresses: str) -> subprocess.CompletedProcess[str]:
    hosts = [{"name": "", "address": address, "identity": IDENTITY} for address in addresses]
    command = [sys.executable, "-m", "meshgate_gateway.engine.reap_orphans", "--hosts", json.dumps(hosts)]
    command += ["--timeout", str(DEADLINE)]
    return subprocess.run(command, capture_output=True, text=True, timeout=3 * DEADLINE, check=False)


@pytest.mark.timeout(600)  # Monarch starts five times, one after the other
def test_what_a_dead_client_left_is_killed_and_its_hosts_stay_usable() -> None:
    with tempfile.TemporaryDirectory(prefix="mg_") as directory:
        workers = [Worker(f"ipc://{directory}/{rank}") for rank in range(2)]
        addresses = [worker.address for worker in workers]
        client = Client(*addresses)
        started = client.run("start")
        client.close()
        reaped = reap_orphans(*addresses)
        assert reaped.returncode == 0, reaped.stderr
        wait_gone(*client.pids, *started)

        another = Client(*addresses)
        assert another.run("call") == another.pids
        another.close()
        for worker in workers:
            worker.close()


def test_hosts_that_do_not_answer_are_named_in_the_error() -> None:
    nowhere = {"name": "", "address": "ipc:///nowhere/at/all", "identity": IDENTITY}
    command = ["--hosts", json.dumps([nowhere]), "--timeout", "0.5"]
    ran = subprocess.run(
        [sys.executable, "-m", "meshgate_gateway.engine.reap_orphans", *command],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert ran.returncode == 1
    assert "/nowhere/at/all" in ran.stderr
