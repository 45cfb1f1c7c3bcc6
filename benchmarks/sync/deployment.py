"""A meshgate deployment on one machine: this process is the laptop, with the real client and a session through the
engine's websocket. The gateway and each host are processes with their own stores, as in a cluster."""

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

from benchmarks.processes import ROOT, network_proxy
from benchmarks.sync.moved import CpuClock, Moved
from meshgate import Client, UrlDialer
from meshgate.code_sync.project import Tree
from meshgate.code_sync.push import CodeSync
from meshgate_sync.relay.plan import GATEWAY
from meshgate_sync.store.home import open_version
from meshgate_sync.tree.scan import Scanner

_SECONDS_TO_END = 20.0
_SECONDS_TO_REDIAL = 20.0


class Deployment:
    def __init__(self, client: Client, dialer: UrlDialer, tree: Path, top: Path, processes: Sequence[_Talker]) -> None:
        self._client, self._dialer = client, dialer
        self._code, self._top = CodeSync(client, Tree(tree)), top
        self._gateway = processes[0]
        self._stack = ExitStack()
        self._hosts = len(processes) - 1
        self._clock = CpuClock(lambda: [talker.pid for talker in processes])

    @classmethod
    @contextmanager
    def started(
        cls, tree: Path, top: Path, hosts: int, *, shape: Mapping[str, int] | None = None
    ) -> Iterator[Deployment]:
        """``shape``: ``fanout`` and ``stripes``, if not the defaults. Stores are created below ``top``."""
        with ExitStack() as stack:
            gateway = stack.enter_context(_Talker("benchmarks.sync.gateway", {"MESHGATE_HOME": str(top / "gateway")}))
            serve = "meshgate_sync.distribution.agent"
            talkers = {f"h{number}": stack.enter_context(_Talker(serve, {})) for number in range(hosts)}
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
            dialer = UrlDialer(f"ws://127.0.0.1:{announced['port']}", "benchmark")
            client = stack.enter_context(Client.connect(dialer))
            deployment = cls(client, dialer, tree, top, [gateway, *talkers.values()])
            stack.enter_context(deployment._stack)
            yield deployment

    def move_away(self, round_trip: float) -> None:
        """Adds a round-trip time of ``round_trip`` seconds between laptop and gateway: cuts the connection, and the
        session continues through a relay."""
        target = self._dialer.url.rpartition("/")[2]
        port = self._stack.enter_context(network_proxy(target, round_trip=round_trip))
        connections = self._client.statistics().connections
        self._dialer.url = f"ws://127.0.0.1:{port}"
        self._gateway.say({"cut": True})
        self._gateway.hear()
        deadline = time.monotonic() + _SECONDS_TO_REDIAL
        while self._client.statistics().connections == connections:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the session was not resumed through the relay within {_SECONDS_TO_REDIAL:.0f} s")
            time.sleep(0.01)

    def push(self, changed: Sequence[Path] | None = None) -> Moved:
        """Syncs the tree to every host. ``changed``: the paths a watcher reported; if None, the tree is scanned."""
        left = self._left()
        self._clock.start()
        started = time.perf_counter()
        report = self._code.push(None if changed is None else [os.fspath(path) for path in changed])
        seconds = time.perf_counter() - started
        cpu = self._clock.taken()
        return Moved(seconds, report.nbytes, self._left() - left, cpu)

    def _left(self) -> int:
        """The bytes that the gateway has sent so far."""
        self._gateway.say({"left": True})
        return int(self._gateway.hear()["left"])

    def processes(self) -> HostProcesses:
        """A process on each host from the version pushed last, as the engine starts them, called once."""
        root = self._version()
        self._gateway.say({"need": root})
        self._gateway.hear()
        return HostProcesses([str(self._top / f"h{number}") for number in range(self._hosts)], root)

    def open_everywhere(self) -> None:
        """Waits until processes can be started on every host from the version pushed last."""
        for number in range(self._hosts):
            open_version(str(self._top / f"h{number}"), self._version()).close()

    def _version(self) -> str:
        version = self._client.code_version
        assert version is not None
        return version

    def check(self, tree: Path) -> None:
        """Raises AssertionError unless the first and the last host have the content of ``tree``."""
        wanted = Scanner(tree).scan().tree
        for number in {0, self._hosts - 1}:
            snapshot = self._top / f"h{number}" / "snapshots" / wanted.digest.hex()
            assert Scanner(snapshot).scan().tree == wanted, f"host {number} does not have what it acknowledged"


class HostProcesses:
    """Processes that run from a version. ``stop`` ends them; so does leaving the block."""

    def __init__(self, homes: Sequence[str], root: str) -> None:
        self._running = [_Talker("benchmarks.sync.process", {}, home, root) for home in homes]
        for process in self._running:
            process.hear()

    def stop(self) -> None:
        for process in self._running:
            process.__exit__()
        self._running = []

    def __enter__(self) -> HostProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Talker:
    """A process that reads and writes JSON objects, one per line, and ends with its input."""

    def __init__(self, module: str, environment: Mapping[str, str], *arguments: str) -> None:
        paths = [
            str(ROOT),
            *(str(ROOT / part) for part in ("client", "gateway", "clusters", "sync", "wire")),
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
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
