"""``python -m benchmarks.beside``: what it costs, and what it brings, if the gateway is not on the engines' machine.

For docs/decisions/engine-beside-workers.md. Each machine is a network namespace (needs root, and ``ip`` of iproute2):
the driver's, one with the engines and a worker, and two for gateways that forward. The server beside the engines
accepts clients as well here, for comparison.

First the same calls take three ways in turn, each in a session of its own: the Unix socket of the server beside the
engine, TCP to it, and TCP to a gateway that forwards. Then gateways are replaced while calls run, and the actor records
the calls it runs, so that a lost or repeated one shows.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from typing import Any

import meshgate as kt
from benchmarks.driver import Driver
from benchmarks.processes import ROOT, OtherProcesses, usage_of
from benchmarks.restarts import call_and_kill, server_of
from benchmarks.workload import Target
from meshgate.session.dialing import Route
from meshgate_wire.proof import engines_key

TIMEOUT = 60.0
TURNS = 10  # of each way, in each round
CALLS_PER_TURN = 50
PREFIX = "mgbeside-"
ADDRESSES = {"driver": "10.213.7.1", "host0": "10.213.7.2", "a": "10.213.7.4", "b": "10.213.7.5"}
PORT = 8650
_NEW_NETWORK = 0x40000000


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextlib.contextmanager
def network() -> Iterator[None]:
    """The namespaces, connected to a bridge in that of the driver, which this process enters."""
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.ExitStack() as stack:
        outside = stack.enter_context(open("/proc/self/ns/net"))
        for name in ADDRESSES:
            _ip("netns", "add", PREFIX + name)
            stack.callback(_ip, "netns", "delete", PREFIX + name)
            _ip("-n", PREFIX + name, "link", "set", "lo", "up")
        _ip("-n", PREFIX + "driver", "link", "add", "bridge", "type", "bridge")
        _ip("-n", PREFIX + "driver", "addr", "add", ADDRESSES["driver"] + "/24", "dev", "bridge")
        _ip("-n", PREFIX + "driver", "link", "set", "bridge", "up")
        for name in ADDRESSES.keys() - {"driver"}:
            place = ("-n", PREFIX + "driver", "link")
            _ip(*place, "add", "name", name, "type", "veth", "peer", "name", "eth0", "netns", PREFIX + name)
            _ip(*place, "set", "dev", name, "master", "bridge", "up")
            _ip("-n", PREFIX + name, "addr", "add", ADDRESSES[name] + "/24", "dev", "eth0")
            _ip("-n", PREFIX + name, "link", "set", "eth0", "up")
        with open(f"/var/run/netns/{PREFIX}driver") as inside:
            _enter(libc, inside.fileno())
        stack.callback(_enter, libc, outside.fileno())
        yield


def _enter(libc: ctypes.CDLL, namespace: int) -> None:
    """For this thread, and those that it starts."""
    if libc.setns(namespace, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "cannot enter the network namespace")


def start(
    machine: str, module: str, *arguments: str, token: str, passed: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    """Starts ``python -m module`` on a machine."""
    return subprocess.Popen(
        ["ip", "netns", "exec", PREFIX + machine, sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "MESHGATE_TOKEN": token, "PYTHONPATH": str(ROOT)},
        pass_fds=passed,
    )


@contextlib.contextmanager
def engines(key: str) -> Iterator[dict[str, Any]]:
    """A job with one worker on the machine ``host0``, beside its engines. Yields what their server announces."""
    lifetime, ours = os.pipe()
    announcement, theirs = os.pipe()
    listening = ("--host", ADDRESSES["host0"], "--port", str(PORT), "--local-socket")
    descriptors = ("--lifetime-fd", str(lifetime), "--announce-fd", str(theirs))
    options = (*listening, *descriptors, "--local-mesh", "workers=1", "--log-level", "error")
    process = start("host0", "meshgate_gateway", *options, token=key, passed=(lifetime, theirs))
    os.close(lifetime)
    os.close(theirs)
    try:
        with os.fdopen(announcement) as announced:
            yield json.loads(announced.readline())
    finally:
        os.close(ours)
        process.wait(TIMEOUT)


class Gateways:
    """The gateways of a job, one on each of two machines, and the address of one that is ready: a ``Dialer``, which
    stands for a Service of Kubernetes. ``replicas``: how many run at a time. ``silently``: the machine of the gateway
    is lost with it, so that the driver gets no sign of it."""

    def __init__(self, token: str, replicas: int, *, silently: bool = False) -> None:
        self.kills = 0
        self._token, self._silently = token, silently
        self._machines = ["a", "b"][:replicas]  # that have a gateway, the one in use first
        self._processes = {machine: self._start(machine) for machine in self._machines}
        for machine in self._machines:
            self._wait_ready(machine)

    async def dial(self) -> Route:
        machine = next(iter(self._machines), None)
        if machine is None:
            raise ConnectionRefusedError("no gateway is ready")
        url = f"ws://{ADDRESSES[machine]}:{PORT}"
        return await kt.UrlDialer(url, self._token, here=True).dial()

    async def gone(self) -> str | None:
        return None

    def __str__(self) -> str:
        return "the gateway"

    def kill(self) -> None:
        """Kills the gateway in use. The other one takes over: at once, or, if it is the only one, when it is ready."""
        lost = self._machines.pop(0)
        other = "a" if lost == "b" else "b"
        self.kills += 1
        if self._silently:
            _ip("-n", PREFIX + "driver", "link", "set", "dev", lost, "down")
            return
        self._processes[lost].send_signal(signal.SIGKILL)
        self._processes.pop(lost).wait()
        replacement = lost if self._machines else other
        self._processes[replacement] = self._start(replacement)
        if not self._machines:
            self._wait_ready(replacement)
        self._machines.append(replacement)

    @property
    def pid(self) -> int:
        """That of the server of the gateway in use."""
        return server_of(self._processes[self._machines[0]].pid)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _start(self, machine: str) -> subprocess.Popen[bytes]:
        listening = ("--host", ADDRESSES[machine], "--port", str(PORT))
        engines = f"{ADDRESSES['host0']}:{PORT}"
        options = (*listening, "--forward-to", engines, "--log-level", "error")
        return start(machine, "meshgate_gateway", *options, token=self._token)

    @staticmethod
    def _wait_ready(machine: str) -> None:
        deadline = time.monotonic() + TIMEOUT
        while True:
            connection = HTTPConnection(ADDRESSES[machine], PORT, timeout=TIMEOUT)
            try:
                connection.request("GET", "/readyz")
                if connection.getresponse().status == 200:
                    return
            except ConnectionError:
                pass
            finally:
                connection.close()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the gateway on {machine} does not find the engines")
            time.sleep(0.01)


def costs(clients: dict[str, kt.Client], gateway: int, rounds: int) -> dict[str, Any]:
    """Sequential calls, and 1,000 calls in flight, in ms: the median of each round, in which the ways take turns.
    ``gateway`` is the pid of the gateway that forwards."""
    drivers: dict[str, Driver] = {}
    for name, client in clients.items():
        driver = drivers[name] = Driver()
        driver.one = client.attach_hosts("workers", 1).spawn_procs().spawn("target", Target).slice(hosts=0)
        driver.sequential(1, 200)
        driver.in_flight(1000)
    used = _processor_time(gateway)
    sequential = _in_turn(drivers, rounds, TURNS, lambda driver: driver.sequential(1, CALLS_PER_TURN))
    used = (_processor_time(gateway) - used) / (rounds * TURNS * CALLS_PER_TURN)
    in_flight = _in_turn(drivers, rounds, 5, lambda driver: [driver.in_flight(1000)])
    return {
        "sequential_ms": _compared(sequential),
        "processor_time_of_the_gateway_us": round(1e6 * used),
        "in_flight_ms": _compared(in_flight),
    }


def _in_turn(
    drivers: dict[str, Driver], rounds: int, turns: int, measure: Callable[[Driver], list[float]]
) -> dict[str, list[float]]:
    """By driver, the median of each round in ms."""
    medians: dict[str, list[float]] = {name: [] for name in drivers}
    for _ in range(rounds):
        seconds: dict[str, list[float]] = {name: [] for name in drivers}
        for _ in range(turns):
            for name, driver in drivers.items():
                seconds[name] += measure(driver)
        for name, found in seconds.items():
            medians[name].append(1e3 * statistics.median(found))
    return medians


def _processor_time(pid: int) -> float:
    usage = usage_of(pid)
    assert usage is not None
    return usage.cpu


def _compared(found: dict[str, list[float]]) -> dict[str, Any]:
    facts: dict[str, Any] = {name: [round(value, 3) for value in values] for name, values in found.items()}
    for one, other in (("gateway", "unix"), ("tcp", "unix"), ("gateway", "tcp")):
        ratios = [round(mine / its, 3) for mine, its in zip(found[one], found[other], strict=True)]
        facts[f"{one}/{other}"] = {"median": round(statistics.median(ratios), 3), "rounds": ratios}
    return facts


@contextlib.contextmanager
def _gateways(token: str, replicas: int, *, silently: bool = False) -> Iterator[Gateways]:
    gateways = Gateways(token, replicas, silently=silently)
    try:
        yield gateways
    finally:
        gateways.close()


def measure(rounds: int, calls: int, kills: int, window: int) -> dict[str, Any]:
    token = secrets.token_hex(32)
    key = engines_key(token)
    others, facts = OtherProcesses(), {"load_before": os.getloadavg()}
    with network(), engines(key) as announced:
        with _gateways(token, 1) as gateways, kt.Client(gateways) as client:
            direct = kt.UrlDialer(announced["url"], key, here=True)
            local = kt.UrlDialer(announced["url"], key, here=True, unix_socket=announced["socket"])
            with kt.Client(local) as unix, kt.Client(direct) as tcp:
                facts |= costs({"unix": unix, "tcp": tcp, "gateway": client}, gateways.pid, rounds)
            facts["one gateway"] = call_and_kill(client, gateways, calls, kills, window)
        with _gateways(token, 2) as gateways, kt.Client(gateways) as client:
            facts["two gateways"] = call_and_kill(client, gateways, calls, kills, window)
        with _gateways(token, 2, silently=True) as gateways, kt.Client(gateways) as client:
            facts["two gateways, a machine lost"] = call_and_kill(client, gateways, calls, 1, window)
    return {**facts, "load_after": os.getloadavg(), "cores_used_by_others": round(others.cores_used(), 2)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beside", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=20_000, help="calls while gateways are replaced")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--window", type=int, default=100, help="calls in flight meanwhile")
    options = parser.parse_args()
    found = measure(options.rounds, options.calls, options.kills, options.window)
    print(json.dumps(found, indent=1))
    runs = [facts for facts in found.values() if isinstance(facts, dict) and "lost" in facts]
    return 0 if all(run["in_order"] and not run["lost"] and not run["twice"] for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
