"""Two gateways forward to one with a real engine: they are killed under calls, and nothing is lost or runs twice."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

import meshgate as kt
from meshgate.session.dialing import Route
from meshgate_wire.proof import engines_key
from tests.end_to_end.actors import Worker
from tests.gateway.server_process import TOKEN, ServerProcess

pytestmark = pytest.mark.any_release

PROGRAM = ("-m", "meshgate_gateway")
CALLS = 300
KILLS = 3
TIMEOUT = 120.0


class Gateways:
    """Two gateways in front of ``engines``: a ``Dialer``, in place of a Service of Kubernetes."""

    def __init__(self, engines: ServerProcess) -> None:
        self._engines = engines
        self._running = [self._start(), self._start()]

    async def dial(self) -> Route:
        return await kt.UrlDialer(self._running[0].url, TOKEN, here=True).dial()

    async def gone(self) -> str | None:
        return None

    def __str__(self) -> str:
        return "the gateways"

    def kill(self) -> None:
        """Kills the one in use. The other one takes its place, and one that is started that of the other."""
        used = self._running.pop(0)
        os.kill(used.process.pid, signal.SIGKILL)  # its server ends with it
        used.close()
        self._running.append(self._start())

    def close(self) -> None:
        for each in self._running:
            each.close()

    def _start(self) -> ServerProcess:
        return ServerProcess("--forward-to", f"127.0.0.1:{self._engines.port}", program=PROGRAM)


@pytest.fixture
def gateways() -> Iterator[Gateways]:
    arguments = ("--local-mesh", "workers=1", "--behind-gateways")
    environment = {"MESHGATE_TOKEN": engines_key(TOKEN)}
    with ServerProcess(*arguments, environment=environment, program=PROGRAM) as engines:
        made = Gateways(engines)
        try:
            yield made
        finally:
            made.close()


def test_calls_run_once_and_in_order_while_gateways_are_killed(gateways: Gateways) -> None:
    with kt.Client(gateways) as client:
        worker = client.attach_hosts("workers", 1).spawn_procs().spawn("worker", Worker).slice(hosts=0)
        worker.record.call_one(-1).get(timeout=TIMEOUT)
        futures = []
        for number in range(CALLS):
            futures.append(worker.record.call_one(number))
            if number % (CALLS // KILLS) == 7:
                gateways.kill()
        assert [future.get(timeout=TIMEOUT) for future in futures] == list(range(CALLS))
        assert worker.recorded.call_one().get(timeout=TIMEOUT) == list(range(-1, CALLS))
