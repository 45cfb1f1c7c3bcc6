"""A driver that uses meshgate, optionally with a network proxy between it and the gateway."""

from __future__ import annotations

import json
import os
import random
import secrets
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.driver import Driver, timed
from benchmarks.peer import leave, serve
from benchmarks.processes import ROOT, Usage, descendants, network_proxy, usage_of
from benchmarks.workload import Target
from meshgate import Client, UrlDialer
from meshgate.testing import NetworkProxy


class Meshgate(Driver):
    def open(self, round_trip: float = 0.0, rate: float = 0.0, cuts: bool = False, tcp: bool = False) -> dict[str, Any]:
        """Connects to the gateway's unix socket, as ``ProcessJob`` does, or by TCP for a proxy or with ``tcp``."""
        self._stack = ExitStack()
        token = secrets.token_urlsafe(16)
        gateway = self._start_gateway(token)
        url, unix_socket = gateway["url"], gateway["socket"]
        target = urlsplit(url).netloc
        if tcp or cuts or round_trip:
            unix_socket = None
        if cuts:
            host, _, port = target.rpartition(":")
            self._proxy = self._stack.enter_context(NetworkProxy(host, int(port)))
            url = f"ws://127.0.0.1:{self._proxy.port}"
        elif round_trip:
            port = self._stack.enter_context(network_proxy(target, round_trip=round_trip, rate=rate))
            url = f"ws://127.0.0.1:{port}"
        self._dialer = UrlDialer(url, token, unix_socket=unix_socket)
        self._client = self._stack.enter_context(Client.connect(self._dialer))
        self.hosts = self._client.attach_hosts("workers", 2)
        self.open_meshes()
        return {}

    def _start_gateway(self, token: str) -> dict[str, Any]:
        announced, announce = os.pipe()
        lifetime, lifetime_writer = os.pipe()
        descriptors = ["--local-socket", "--announce-fd", str(announce), "--lifetime-fd", str(lifetime)]
        paths = filter(None, [os.environ.get("PYTHONPATH")])
        gateway = subprocess.Popen(
            [sys.executable, "-m", "meshgate_gateway", "--local-mesh", "workers=2", *descriptors],
            env={**os.environ, "MESHGATE_TOKEN": token, "PYTHONPATH": os.pathsep.join([*paths, str(ROOT)])},
            pass_fds=(announce, lifetime),
        )
        for descriptor in (announce, lifetime):
            os.close(descriptor)
        self._stack.callback(gateway.wait)
        self._stack.callback(os.close, lifetime_writer)
        with os.fdopen(announced) as lines:
            return dict(json.loads(lines.readline()))

    def calls_with_cuts(self, calls: int, cuts: int, window: int) -> dict[str, Any]:
        """Resets the connection ``cuts`` times during ``calls`` calls, of which ``window`` are in flight."""
        actor = self.hosts.spawn_procs(per_host={"gpus": 1}, name="cut").spawn("cut", Target).slice(hosts=0, gpus=0)
        actor.note.call_one(-1).get()
        cutter = _Cutter(self._client, self._proxy, cuts)
        start = time.perf_counter()
        results: list[int] = []
        in_flight: deque[Any] = deque()
        for number in range(calls):
            cutter.wait_reached(number * cuts // calls)
            in_flight.append(actor.note.call_one(number))
            if len(in_flight) == window:
                results.append(in_flight.popleft().get(60))
        results += [future.get(60) for future in in_flight]
        cutter.join()
        duration = time.perf_counter() - start
        ran = actor.noted.call_one().get()[1:]
        return {
            "seconds": duration,
            "cuts": cutter.done,
            "replayed": self._client.statistics().frames_replayed,
            "lost": calls - len(set(ran)),
            "twice": len(ran) - len(set(ran)),
            "in_order": ran == list(range(calls)) and results == ran,
        }

    def hand_over(self, nbytes: int, times: int) -> list[float]:
        return timed(lambda: self.separate.take.call_one(self.one.give.keep(nbytes)).get(), times)

    def iterate(self, trainers: Any, nbytes: int) -> None:
        trainers.take.call(self.four.give.keep(nbytes)).get()

    def hand_over_without_keep(self, nbytes: int, times: int) -> list[float]:
        return super().hand_over(nbytes, times)

    def in_sessions(self, sessions: int, calls: int) -> dict[str, Any]:
        """With ``sessions`` sessions on the gateway, this one among them, one call after the other in each of them."""
        with ExitStack() as stack:
            actors = [self.one]
            for _ in range(sessions - 1):
                hosts = stack.enter_context(Client.connect(self._dialer)).attach_hosts("workers", 2)
                procs = hosts.slice(hosts=0).spawn_procs(per_host={"gpus": 1}, name="another")
                actors.append(procs.spawn("another", Target))
                actors[-1].echo.call_one(b"").get()
            seconds = [timed(partial(_call, actor), calls) for actor in actors]
            server, engines = _processes_of_gateway()
            return {"calls": seconds, "server": server.rss, "engines": [engine.rss for engine in engines]}

    def peak_memory(self, direction: str, nbytes: int) -> dict[str, int]:
        """By how many bytes an array more than the warm session takes at most, in the engine and in this process."""
        engine = max(_processes_of_gateway()[1], key=_cpu).pid
        pids = {"engine": engine, "client": os.getpid()}
        before = {name: _peak(pid, reset=True) for name, pid in pids.items()}
        (self.array_up if direction == "up" else self.array_down)(nbytes, 1)
        peaks = {name: _peak(pid) - before[name] for name, pid in pids.items()}
        self._arrays.clear()
        return peaks

    def memory(self) -> dict[str, int]:
        """The resident bytes of the server, the session's engine and this process."""
        server, engines = _processes_of_gateway()
        own = usage_of(os.getpid())
        assert own is not None
        return {"server": server.rss, "engine": max(engines, key=_cpu).rss, "client": own.rss}

    def close(self) -> None:
        self._stack.close()


class _Cutter(threading.Thread):
    """Resets each connection at a random time after it is established."""

    def __init__(self, client: Client, proxy: NetworkProxy, cuts: int) -> None:
        super().__init__(daemon=True)
        self._client, self._proxy, self._cuts = client, proxy, cuts
        self._changed = threading.Condition()
        self._wanted = 0
        self.done = 0
        self.start()

    def run(self) -> None:
        connections = self._client.statistics().connections
        while self.done < self._cuts:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted >= self.done)
            while self._client.statistics().connections < connections:
                time.sleep(0.0005)
            time.sleep(random.uniform(0, 0.004))
            connections = self._client.statistics().connections + 1
            self._proxy.cut()
            with self._changed:
                self.done += 1
                self._changed.notify()

    def wait_reached(self, cuts: int) -> None:
        """Waits until at most five of the first ``cuts`` are outstanding."""
        with self._changed:
            self._wanted = cuts
            self._changed.notify()
            self._changed.wait_for(lambda: self.done >= cuts - 5)


def _call(actor: Any) -> None:
    actor.echo.call_one(b"x" * 100).get()


def _processes_of_gateway() -> tuple[Usage, list[Usage]]:
    """The server, and the engine of each session."""
    processes = [usage for pid in descendants(os.getpid()) if (usage := usage_of(pid)) is not None]
    servers = [usage for usage in processes if "-m meshgate_gateway --" in usage.command]
    return max(servers, key=_rss), [usage for usage in processes if "meshgate_gateway.engine" in usage.command]


def _peak(pid: int, *, reset: bool = False) -> int:
    """The most bytes of memory that the process has had since the last reset (proc(5): clear_refs)."""
    if reset:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def _cpu(usage: Usage) -> float:
    return usage.cpu


def _rss(usage: Usage) -> int:
    return usage.rss


if __name__ == "__main__":
    serve(Meshgate())
    leave()
