"""The worker host as a process, with a real Monarch root client."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DEADLINE = 60.0
CLIENT = Path(__file__).parent / "root_client.py"


class Worker:
    """One host process and the pipes that hold it."""

    def __init__(self, address: str, *arguments: str) -> None:
        ready, ready_there = os.pipe()
        lifetime_there, self.lifetime = os.pipe()
        self.address = address
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "meshgate_worker", "--address", address, "--name", "workers-0"),
                *("--ready-fd", str(ready_there), "--lifetime-fd", str(lifetime_there), *arguments),
            ],
            pass_fds=(ready_there, lifetime_there),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.close(ready_there)
        os.close(lifetime_there)
        with os.fdopen(ready) as said:
            line = said.readline()
        self.ready: dict[str, Any] | None = json.loads(line) if line else None

    def let_go(self) -> None:
        if self.lifetime >= 0:
            os.close(self.lifetime)
            self.lifetime = -1

    def ended(self) -> tuple[int, str]:
        """The exit code and the last line of the output."""
        output, _ = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, output.decode().strip().rpartition("\n")[2]

    def close(self) -> None:
        self.let_go()
        self.process.wait(DEADLINE)
        assert self.process.stdout is not None
        self.process.stdout.close()


class Client:
    """A root client; ``pids`` are the processes that it spawned on the hosts."""

    def __init__(self, *addresses: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CLIENT), *addresses], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pids: list[int] = self.answer()

    def do(self, command: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(("[", '"')):
                return json.loads(line)
        raise AssertionError("the client ended")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mg_") as directory:  # short: a socket's path has 108 bytes
        yield Path(directory)


@pytest.fixture
def worker(directory: Path) -> Iterator[Worker]:
    worker = Worker(f"ipc://{directory}/host")
    yield worker
    worker.close()


@pytest.fixture
def client(worker: Worker) -> Iterator[Client]:
    client = Client(worker.address)
    yield client
    client.close()


def wait_gone(*pids: int) -> None:
    deadline = time.monotonic() + DEADLINE
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            gone, _, _ = select.select([descriptor], [], [], max(0, deadline - time.monotonic()))
            assert gone, f"process {pid} is still there"
        finally:
            os.close(descriptor)


def test_a_host_that_says_it_is_ready_can_be_attached_to(worker: Worker, client: Client) -> None:
    assert worker.ready is not None
    assert worker.ready["address"] == worker.address
    assert len(client.pids) == 2
    assert client.do("call") == client.pids


def test_sigterm_ends_the_host_and_all_that_was_started_on_it(worker: Worker, client: Client) -> None:
    started = client.do("start")
    worker.process.send_signal(signal.SIGTERM)
    assert worker.ended() == (0, "meshgate_worker workers-0: ended: SIGTERM")
    wait_gone(*client.pids, *started)


def test_a_host_ends_with_whoever_started_it(worker: Worker, client: Client) -> None:
    started = client.do("start")
    worker.let_go()
    assert worker.ended() == (0, "meshgate_worker workers-0: ended: the process that started this host is gone")
    wait_gone(*client.pids, *started)


def test_a_killed_host_takes_its_monarch_processes_along(worker: Worker, client: Client) -> None:
    worker.process.kill()
    wait_gone(*client.pids)


def test_a_client_may_shut_the_host_down(worker: Worker, client: Client) -> None:
    client.do("shutdown")
    assert worker.ended() == (0, "meshgate_worker workers-0: ended: a client shut this host down")
    wait_gone(*client.pids)


def test_two_clients_use_one_host_at_once(worker: Worker, client: Client) -> None:
    other = Client(worker.address)
    assert not set(other.pids) & set(client.pids)
    other.close()
    assert client.do("call") == client.pids


def test_a_host_is_reached_under_one_name_and_listens_under_another() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    worker = Worker(f"tcp://localhost:{port}@tcp://0.0.0.0:{port}")
    assert worker.ready is not None
    worker.close()


def test_variables_in_the_address_are_expanded(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", str(directory))
    worker = Worker("ipc://$WHERE/host")
    assert worker.ready is not None
    assert worker.ready["address"] == f"ipc://{directory}/host"
    worker.close()


def test_an_address_in_use_is_told_and_not_taken_over(worker: Worker) -> None:
    second = Worker(worker.address)
    assert second.ready is None
    code, reason = second.ended()
    assert code == 2
    assert f"another process already serves {worker.address}" in reason
    second.close()
    assert worker.process.poll() is None


def test_a_socket_that_a_killed_host_left_is_in_nobodys_way(worker: Worker, directory: Path) -> None:
    worker.process.kill()
    worker.process.wait(DEADLINE)
    assert (directory / "host").exists()
    second = Worker(worker.address, "--remove-directory")
    assert second.ready is not None
    second.close()
    assert not directory.exists()
    directory.mkdir()


@pytest.mark.parametrize(
    ("address", "code", "reason"),
    [
        ("nonsense", 2, "the address 'nonsense' is none a host can serve"),
        ("ipc:///nowhere/at/all", 1, "Monarch failed: ValueError: listen: unix:/nowhere/at/all No such file"),
    ],
)
def test_a_host_that_cannot_start_says_why(address: str, code: int, reason: str) -> None:
    worker = Worker(address)
    assert worker.ready is None
    ended = worker.ended()
    assert ended[0] == code
    assert reason in ended[1]
    worker.close()


def test_help_explains_every_option() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "meshgate_worker", "--help"], capture_output=True, text=True, check=True
    )
    for option in ("--address", "--name", "--lifetime-fd", "--ready-fd", "--grace", "--remove-directory"):
        assert option in told.stdout
