"""rsync to many hosts in parallel: one daemon with a directory for each host, and one client for each.

The delta algorithm is on, and times are compared to the nanosecond. Connections use the loopback, as meshgate's do, or
the same relay.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.processes import network_proxy
from benchmarks.sync.moved import CpuClock, Moved

_FLAGS = ("-a", "--delete", "--no-whole-file", "--modify-window=-1", "--stats")
_START_TIMEOUT = 10.0


class Rsync:
    """``push`` syncs the tree to every host, after ``move_away`` through a relay."""

    def __init__(self, tree: Path, port: int, daemon: int, hosts: int, stack: ExitStack) -> None:
        self._tree, self._port, self._hosts = tree, port, hosts
        self._stack = stack
        self._clock = CpuClock(lambda: [daemon], children=True)

    @classmethod
    @contextmanager
    def serving(cls, tree: Path, top: Path, hosts: int) -> Iterator[Rsync]:
        """Creates the directories below ``top``."""
        modules = []
        for number in range(hosts):
            (top / f"copy{number}").mkdir(parents=True)
            modules.append(f"[h{number}]\npath = {top / f'copy{number}'}\nread only = no\n")
        own = f"uid = {os.getuid()}\ngid = {os.getgid()}\n" if os.getuid() == 0 else ""
        configuration = top / "rsyncd.conf"
        general = f"use chroot = no\nreverse lookup = no\nlog file = {top / 'rsyncd.log'}\n{own}"
        configuration.write_text(general + "".join(modules))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = ["rsync", "--daemon", "--no-detach", f"--config={configuration}", "--address=127.0.0.1"]
        with subprocess.Popen([*command, f"--port={port}"], stdin=subprocess.DEVNULL) as daemon, ExitStack() as stack:
            stack.callback(daemon.terminate)
            _wait_listening(port, daemon)
            yield cls(tree, port, daemon.pid, hosts, stack)

    def move_away(self, round_trip: float) -> None:
        """Adds a round-trip time of ``round_trip`` seconds between the clients and the daemon."""
        self._port = self._stack.enter_context(network_proxy(f"127.0.0.1:{self._port}", round_trip=round_trip))

    def push(self) -> Moved:
        self._clock.start()
        started = time.perf_counter()
        running = [
            subprocess.Popen(
                ["rsync", *_FLAGS, f"{self._tree}/", f"rsync://127.0.0.1:{self._port}/h{number}/"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "LC_ALL": "C"},
            )
            for number in range(self._hosts)
        ]
        outputs = [process.communicate()[0] for process in running]
        seconds = time.perf_counter() - started
        for process in running:
            if process.returncode:
                raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
        sent = sum(int(found.replace(",", "")) for out in outputs for found in re.findall(r"bytes sent: ([\d,]+)", out))
        return Moved(seconds, sent, 0, self._clock.taken())


def _wait_listening(port: int, daemon: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError as error:
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the rsync daemon does not listen on port {port}") from error
            time.sleep(0.02)
