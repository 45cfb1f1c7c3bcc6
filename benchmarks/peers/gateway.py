"""A driver that goes through meshgate; the relay, where there is one, stands between it and the gateway."""

from __future__ import annotations

import json
import os
import random
import secrets
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

from tests.relay import Relay

from benchmarks.driver import Driver
from benchmarks.peer import leave, serve
from benchmarks.processes import ROOT, Usage, descendants, relay, usage_of
from benchmarks.workload import Target
from meshgate import Client, UrlDialer


class Through(Driver):
    def open(self, round_trip: float = 0.0, cuts: bool = False) -> dict[str, Any]:
        self._stack = ExitStack()
        token = secrets.token_urlsafe(16)
        url = self._gateway(token)
        target = urlsplit(url).netloc
        if cuts:
            host, _, port = target.rpartition(":")
            self._relay = self._stack.enter_context(Relay(host, int(port)))
            url = f"ws://127.0.0.1:{self._relay.port}"
        elif round_trip:
            url = f"ws://127.0.0.1:{self._stack.enter_context(relay(target, round_trip=round_trip))}"
        self._client = self._stack.enter_context(Client.connect(UrlDialer(url, token)))
        self.hosts = self._client.attach_hosts("workers", 2)
        self.open_meshes()
        return {}

    def _gateway(self, token: str) -> str:
        announced, announce = os.pipe()
        lifetime, held = os.pipe()
        descriptors = ["--announce-fd", str(announce), "--lifetime-fd", str(lifetime)]
        paths = filter(None, [os.environ.get("PYTHONPATH")])
        gateway = subprocess.Popen(
            [sys.executable, "-m", "meshgate_gateway", "--local-mesh", "workers=2", *descriptors],
            env={**os.environ, "MESHGATE_TOKEN": token, "PYTHONPATH": os.pathsep.join([*paths, str(ROOT)])},
            pass_fds=(announce, lifetime),
        )
        for descriptor in (announce, lifetime):
            os.close(descriptor)
        self._stack.callback(gateway.wait)
        self._stack.callback(os.close, held)
        with os.fdopen(announced) as lines:
            return str(json.loads(lines.readline())["url"])

    def calls_with_cuts(self, calls: int, cuts: int, window: int) -> dict[str, Any]:
        """``cuts`` resets of the connection, at random moments, while ``calls`` calls pass, ``window`` at a time."""
        actor = self.hosts.spawn_procs(per_host={"gpus": 1}, name="cut").spawn("cut", Target).slice(hosts=0, gpus=0)
        actor.note.call_one(-1).get()
        progress = threading.Semaphore(0)
        stop = threading.Event()
        cutter = threading.Thread(target=self._cut, args=(cuts, calls // cuts, progress, stop))
        cutter.start()
        begin = time.perf_counter()
        results: list[int] = []
        try:
            under_way: list[Any] = []
            for number in range(calls):
                under_way.append(actor.note.call_one(number))
                if len(under_way) == window:
                    results.append(under_way.pop(0).get(60))
                    progress.release()
            for future in under_way:
                results.append(future.get(60))
                progress.release()
        finally:
            stop.set()
            progress.release(calls)
            cutter.join()
        took = time.perf_counter() - begin
        ran = actor.noted.call_one().get()[1:]
        return {
            "seconds": took,
            "cuts": self._done,
            "connections": self._client.statistics().connections,
            "lost": calls - len(set(ran)),
            "twice": len(ran) - len(set(ran)),
            "in_order": ran == list(range(calls)) and results == ran,
        }

    def _cut(self, cuts: int, every: int, progress: threading.Semaphore, stop: threading.Event) -> None:
        """One cut for each ``every`` calls answered, each only when the connection before it is up."""
        self._done = 0
        for _ in range(cuts):
            for _ in range(every):
                progress.acquire()
            time.sleep(random.uniform(0, 0.003))
            while not self._relay.connections and not stop.is_set():
                time.sleep(0.0005)
            self._relay.cut()
            self._done += 1

    def memory(self) -> dict[str, int]:
        """Resident bytes of the server, of the session's engine and of this process."""
        processes = [usage for pid in descendants(os.getpid()) if (usage := usage_of(pid)) is not None]
        engines = [usage for usage in processes if "meshgate_gateway.engine" in usage.command]
        servers = [usage for usage in processes if "-m meshgate_gateway --" in usage.command]
        own = usage_of(os.getpid())
        assert own is not None
        return {"server": servers[0].rss, "engine": max(engines, key=_cpu).rss, "client": own.rss}

    def close(self) -> None:
        self._stack.close()


def _cpu(usage: Usage) -> float:
    return usage.cpu


if __name__ == "__main__":
    serve(Through())
    leave()
