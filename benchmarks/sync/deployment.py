"""meshgate as it syncs, on one machine: this process is the laptop, with the real client and a session through the
engine's websocket; the gateway and each host are processes with stores of their own, as in a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT, relay
from benchmarks.sync.moved import CpuClock, Moved
from meshgate import Client, UrlDialer
from meshgate.code import CodeSync, Tree
from meshgate_sync.plan import GATEWAY
from meshgate_sync.protocol import SyncStatus
from meshgate_sync.scan import Scanner

__all__ = ["Deployment"]

_SECONDS_TO_END = 20.0


class Deployment:
    def __init__(self, code: CodeSync, top: Path, processes: Sequence[_Talker]) -> None:
        self._code, self._top = code, top
        self._hosts = len(processes) - 1
        self._left = 0
        self._clock = CpuClock(lambda: [talker.pid for talker in processes])

    @classmethod
    @contextmanager
    def started(
        cls, tree: Path, top: Path, hosts: int, *, round_trip: float = 0.0, shape: Mapping[str, int] | None = None
    ) -> Iterator[Deployment]:
        """``shape``: ``fanout`` and ``stripes``, where they are not the defaults. Stores are made below ``top``."""
        with ExitStack() as stack:
            gateway = stack.enter_context(_Talker("benchmarks.sync.gateway", {"MESHGATE_HOME": str(top / "gateway")}))
            talkers = {f"h{number}": stack.enter_context(_Talker("meshgate_sync.serve", {})) for number in range(hosts)}
            announced = gateway.hear()
            secret = announced["secret"]
            for name, talker in talkers.items():
                talker.say({"name": name, "secret": secret, "owner": "bench", "home": str(top / name)})
            addresses = {name: talker.hear()["address"] for name, talker in talkers.items()}
            gateway.say({"hosts": addresses, **(shape or {})})
            routes = gateway.hear()["routes"]
            for name, talker in talkers.items():
                talker.say({"routes": routes[name], "addresses": {GATEWAY: announced["relay"], **addresses}})
            for talker in talkers.values():
                talker.hear()
            port = announced["port"]
            if round_trip:
                port = stack.enter_context(relay(f"127.0.0.1:{port}", round_trip=round_trip))
            client = stack.enter_context(Client.connect(UrlDialer(f"ws://127.0.0.1:{port}", "benchmark")))
            yield cls(CodeSync(client, Tree(tree)), top, [gateway, *talkers.values()])

    def push(self, changed: Sequence[Path] | None = None) -> Moved:
        """Brings the tree to every host. ``changed``: what a watcher has told; otherwise it is looked through."""
        left = self._left

        def progress(status: SyncStatus) -> None:
            self._left = status.sent

        self._clock.start()
        started = time.perf_counter()
        report = self._code.push(None if changed is None else [os.fspath(path) for path in changed], progress=progress)
        seconds = time.perf_counter() - started
        return Moved(seconds, report.nbytes, self._left - left if report.files else 0, self._clock.taken())

    def check(self, tree: Path) -> None:
        """Raises AssertionError unless the first host and the last have what is in ``tree``."""
        wanted = Scanner(tree).scan().tree
        for number in {0, self._hosts - 1}:
            snapshot = self._top / f"h{number}" / "snapshots" / wanted.digest.hex()
            assert Scanner(snapshot).scan().tree == wanted, f"host {number} does not have what it acknowledged"


class _Talker:
    """A process that is told and tells JSON objects, one a line, and ends when its input does."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        paths = [str(ROOT), *(str(ROOT / part) for part in ("client", "gateway", "sync"))]
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def say(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait()}")
        return json.loads(line)

    def __enter__(self) -> _Talker:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
