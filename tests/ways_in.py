"""A way into each host, its files and ours, on any job: the same checks on each kind of cluster."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import socket
import struct
import sys
import termios
import threading
import urllib.request
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from meshgate import Actor, JobTrait, endpoint
from tests.waiting import wait_for

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Listener(Actor):
    """Listens on loopback of its host and answers each connection with the host's name."""

    @endpoint
    def listen(self) -> int:
        server = socket.create_server(("127.0.0.1", 0))

        def greet() -> None:
            while True:
                connection, _ = server.accept()
                with connection:
                    connection.sendall(os.uname().nodename.encode())

        threading.Thread(target=greet, daemon=True).start()
        return int(server.getsockname()[1])

    @endpoint
    def wait_in_here(self) -> None:
        threading.Event().wait(600)


def check_commands(job: JobTrait) -> list[str]:
    """The names of the hosts, by rank."""
    result = job.exec(["sh", "-c", "uname -n; exit $CODE"], env={"CODE": "3"}, capture_output=True)
    assert [each.returncode for each in result] == [3] * len(result)
    assert job.exec(["uname", "-n"], ranks=1, capture_output=True)[1].stdout == result[1].stdout
    return [each.stdout.strip() for each in result]


def check_terminal(job: JobTrait, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell on host 1 has the size of this terminal; its exit code is returned."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 31, 97, 0, 0))
    with open(theirs, "r+b", buffering=0) as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", terminal)
        patch.setattr(sys, "stdout", terminal)
        code = job.shell(1, command=["sh", "-c", "stty size; uname -n; exit 5"])
    seen = b""
    with contextlib.suppress(OSError):  # EIO: all is read, and the other side is closed
        while True:
            seen += os.read(ours, 4096)
    os.close(ours)
    assert code == 5
    assert seen.decode().split() == ["31", "97", check_commands(job)[1]]


def check_ports_and_stacks(job: JobTrait, hosts: Any) -> None:
    listeners = hosts.spawn_procs(name="listeners").spawn("listeners", Listener)
    ports = list(listeners.listen.call().get(timeout=60).values())
    for rank, name in enumerate(check_commands(job)):
        with (
            job.forward(ports[rank], rank=rank) as forwarded,
            socket.create_connection(("127.0.0.1", forwarded.port), timeout=60) as connection,
        ):
            assert connection.makefile("rb").read().decode() == name
    pending = listeners.slice(hosts=1).wait_in_here.call_one()
    wait_for(lambda: "wait_in_here" in str(job.stacks(ranks=[1])), "the stack of rank 1 to show what it runs")
    assert "wait_in_here" not in str(job.stacks(ranks=[0]))
    del pending


def check_admin(job: JobTrait) -> None:
    url = job.enable_admin().state(cached_path=None).admin_url
    with urllib.request.urlopen(f"{url}/v1/tree", timeout=60) as answer:
        assert "/v1/host" in answer.read().decode()


def check_telemetry(job: JobTrait) -> None:
    """Starts processes on the hosts: call it last."""
    state = job.enable_telemetry().state(cached_path=None)
    assert state.query_engine_client is not None
    query = state.query_engine_client.query
    listeners = next(iter(state._hosts.values())).spawn_procs(name="observed").spawn("observed", Listener)
    received = "SELECT count(DISTINCT to_actor_id) AS n FROM messages WHERE endpoint = 'listen'"

    def collected() -> bool:
        called = len(listeners.listen.call().get(timeout=60))  # a new process loses what it records before it connects
        return bool(query(received)["rows"][0]["n"] == called)

    wait_for(collected, "each host's messages to be collected")


def check_mounts(job: JobTrait, directory: Path, there: str) -> None:
    """``directory`` is empty, and ``there`` a path that can be made on each host."""
    (directory / "data").mkdir()
    (directory / "data/file").write_text("from here\n")
    job.remote_mount(str(directory / "data"), f"{there}-data", python_exe=None)
    job.gather_mount(f"{there}-out/$SUBDIR", str(directory / "out"))
    job.state(cached_path=None)
    assert [each.stdout for each in job.exec(["cat", f"{there}-data/file"], capture_output=True)] == ["from here\n"] * 2
    job.exec(["sh", "-c", f"mkdir -p {there}-out/hosts_1 && uname -n > {there}-out/hosts_1/name"], ranks=1)
    job.state(cached_path=None)
    name = check_commands(job)[1]
    assert (directory / "out/hosts_1/name").read_text().strip() == name
    job.pull(f"{there}-out/hosts_1", directory / "pulled", ranks=1)
    assert (directory / "pulled/name").read_text().strip() == name
