"""A remote driver that uses Monarch's ``attach()`` to a worker, through the network proxy."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

from benchmarks.driver import Driver
from benchmarks.peer import leave, serve
from benchmarks.processes import network_proxy


class Attached(Driver):
    def open(self, round_trip: float) -> dict[str, Any]:
        import monarch.actor
        from monarch.actor import attach, attach_to_workers

        monarch.actor.unhandled_fault_hook = lambda failure: None
        self._stack = ExitStack()
        addresses = [self._worker(f"workers-{rank}") for rank in range(2)]
        port = self._stack.enter_context(network_proxy(addresses[0].removeprefix("tcp://"), round_trip=round_trip))
        attach(f"tcp://127.0.0.1:{port}")
        self.hosts = attach_to_workers(name="workers", ca="trust_all_connections", workers=addresses)
        self.hosts.initialized.get()
        self.open_meshes()
        return {}

    def _worker(self, name: str) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        lifetime, lifetime_writer = os.pipe()
        ready, ready_writer = os.pipe()
        options = [
            "--address",
            address,
            "--name",
            name,
            "--lifetime-fd",
            str(lifetime),
            "--ready-fd",
            str(ready_writer),
        ]
        worker = subprocess.Popen(
            [sys.executable, "-m", "meshgate_worker", *options], pass_fds=(lifetime, ready_writer)
        )
        os.close(lifetime)
        os.close(ready_writer)
        self._stack.callback(worker.wait)
        self._stack.callback(os.close, lifetime_writer)
        with os.fdopen(ready) as lines:
            return str(json.loads(lines.readline())["address"])

    def close(self) -> None:
        self._stack.close()


if __name__ == "__main__":
    serve(Attached())
    leave()
