"""The gateway's server is killed and replaced under an open session: each call runs once, and nothing is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import meshgate as kt
from meshgate import ProcessJob
from meshgate.testing import NetworkProxy
from tests.end_to_end.actors import Worker
from tests.waiting import wait_for

pytestmark = pytest.mark.any_release

CALLS = 300
KILLS = 3
TIMEOUT = 120.0


def children_of(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def server_of(supervisor: int) -> int | None:
    """The server: the child of the supervisor that is a copy of it and leads a process group. None while there is none.

    What the supervisor starts is a copy of it until it executes, and then leads a session of its own.
    """
    command = Path(f"/proc/{supervisor}/cmdline").read_bytes()
    for child in children_of(supervisor):
        try:
            leads = os.getpgid(child) == child and os.getsid(child) == os.getsid(supervisor)
            if leads and Path(f"/proc/{child}/cmdline").read_bytes() == command:
                return child
        except OSError:  # it has just exited
            continue
    return None


def kill_server(job: Any, victim: int | None = None) -> None:
    """Kills the server and returns once another answers.

    ``victim``: the server, if the supervisor may be starting processes, which are copies of it until they execute.
    """
    gateway = job._gateway
    victim = victim or server_of(gateway.record.pid)
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: gateway.healthy() and server_of(gateway.record.pid) not in (None, victim), "another server")


@pytest.fixture(scope="module")
def job(job_of_its_own: ProcessJob) -> ProcessJob:
    return job_of_its_own  # its servers are killed


@pytest.fixture
def proxy(job: Any) -> Iterator[NetworkProxy]:
    with NetworkProxy("127.0.0.1", urlsplit(job.gateway_url).port) as proxy:
        yield proxy


@pytest.fixture
def workers(job: Any, proxy: NetworkProxy) -> Iterator[Any]:
    with kt.Client(kt.UrlDialer(f"ws://127.0.0.1:{proxy.port}", job._gateway.record.token)) as client:
        yield client.attach_hosts("workers", 2).spawn_procs().spawn("workers", Worker)


def test_calls_run_once_and_in_order_while_servers_are_killed_and_connections_cut(
    job: Any, workers: Any, proxy: NetworkProxy
) -> None:
    worker = workers.slice(hosts=0)
    worker.record.call_one(-1).get(timeout=TIMEOUT)
    futures = []
    for number in range(CALLS):
        futures.append(worker.record.call_one(number))
        if number % (CALLS // KILLS) == 7:
            proxy.cut()
            kill_server(job)
    assert [future.get(timeout=TIMEOUT) for future in futures] == list(range(CALLS))
    assert worker.recorded.call_one().get(timeout=TIMEOUT) == list(range(-1, CALLS))


def test_meshes_are_attached_to_and_sessions_begin_and_end_under_another_server(job: Any, workers: Any) -> None:
    assert workers.rank.call().get(timeout=TIMEOUT).values() == [0, 1]
    kill_server(job)
    with kt.Client(kt.UrlDialer(job.gateway_url, job._gateway.record.token)) as other:
        ranks = other.attach_hosts("workers", 2).spawn_procs().spawn("others", Worker).rank.call()
        assert ranks.get(timeout=TIMEOUT).values() == [0, 1]
    assert workers.rank.call().get(timeout=TIMEOUT).values() == [0, 1]
