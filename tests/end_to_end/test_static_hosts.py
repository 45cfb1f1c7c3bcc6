"""A gateway with a worker that it has not started, at an address that it is given."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.metadata import version

import pytest

import meshgate as kt
from meshgate import InvalidRequestError, StepFailedError
from meshgate.testing import NetworkProxy
from tests.end_to_end.actors import Worker
from tests.gateway.server_process import TOKEN, ServerProcess
from tests.ports import free_port
from tests.worker_image.host_process import IDENTITY
from tests.worker_image.host_process import Worker as HostProcess

TIMEOUT = 120.0
PROMPT = 30.0  # seconds; after 60, Monarch gives up waiting for an answer
BY_IDENTITY = not version("torchmonarch").startswith("0.7")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The port of a worker on this machine."""
    port = free_port()
    worker = HostProcess(f"tcp://127.0.0.1:{port}")
    yield port
    worker.close()


def gateway(address: str) -> ServerProcess:
    return ServerProcess("--mesh", f"workers={address}", program=("-m", "meshgate_gateway"))


def test_actors_run_on_a_worker_at_a_given_address(port: int) -> None:
    with gateway(f"{IDENTITY}@tcp://127.0.0.1:{port}") as server, kt.Client(kt.UrlDialer(server.url, TOKEN)) as client:
        workers = client.attach_hosts("workers", 1).spawn_procs().spawn("workers", Worker)
        assert workers.rank.call_one().get(timeout=TIMEOUT) == 0


def test_a_worker_that_answers_but_not_as_this_host_is_reported_at_once(port: int) -> None:
    """As a worker of another release does."""
    with NetworkProxy("127.0.0.1", port) as proxy:
        other = f"{IDENTITY[::-1]}@tcp://127.0.0.1:{port}"
        address = other if BY_IDENTITY else f"tcp://localhost:{proxy.port}"
        with gateway(address) as server, kt.Client(kt.UrlDialer(server.url, TOKEN)) as client:
            hosts = client.attach_hosts("workers", 1)
            called = hosts.spawn_procs().spawn("workers", Worker).rank.call()
            start = time.monotonic()
            expected = "worker workers-0 .* answers, but not as the host .* has another release of torchmonarch"
            with pytest.raises(InvalidRequestError, match=expected):
                hosts.initialized.get(timeout=TIMEOUT)
            with pytest.raises(StepFailedError, match="cannot attach to mesh 'workers': worker workers-0"):
                called.get(timeout=TIMEOUT)
            assert time.monotonic() - start < PROMPT
