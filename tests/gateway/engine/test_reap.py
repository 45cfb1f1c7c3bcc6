"""The reaper, on a real host: what a dead client left ends, the host itself stays usable."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile

from tests.gateway.server_process import wait_gone
from tests.worker_image.host_process import DEADLINE, Client, Worker


def reap(*addresses: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "meshgate_gateway.engine.reap", "--hosts", json.dumps(addresses)]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)


def test_what_a_dead_client_left_is_ended_and_the_hosts_serve_on() -> None:
    with tempfile.TemporaryDirectory(prefix="mg_") as directory:
        workers = [Worker(f"ipc://{directory}/{rank}") for rank in range(2)]
        addresses = [worker.address for worker in workers]
        client = Client(*addresses)
        started = client.do("start")
        client.close()
        assert reap(*addresses).returncode == 0
        wait_gone(*client.pids, *started)

        another = Client(*addresses)
        assert another.do("call") == another.pids
        another.close()
        for worker in workers:
            worker.close()


def test_a_reaper_that_reaches_no_host_says_so() -> None:
    command = ["--hosts", json.dumps(["ipc:///nowhere/at/all"]), "--timeout", "0.5"]
    ran = subprocess.run(
        [sys.executable, "-m", "meshgate_gateway.engine.reap", *command],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert ran.returncode == 1
    assert "/nowhere/at/all" in ran.stderr
