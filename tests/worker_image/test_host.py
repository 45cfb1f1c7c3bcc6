"""The worker host as a process, with a real Monarch root client."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.server_process import wait_gone
from tests.worker_image.host_process import DEADLINE, Client, Worker


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
