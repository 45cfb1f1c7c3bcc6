"""The worker host as a process, with a real Monarch root client."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshgate_processes.marks import SYNC_AGENT
from meshgate_worker.host import COOKIE_VARIABLE, AddressError, ListeningAt, listening_at, service_address
from tests.gateway.server_process import wait_gone
from tests.ports import free_port
from tests.worker_image.host_process import DEADLINE, Client, Worker

UUID = "5b1c3f60-7a52-4c1e-9d38-2f6f0e7b9a41"
ADDRESS = "tcp://10.0.0.1:26600@tcp://0.0.0.0:26600"
SIGNALS_ITSELF = """
import runpy, signal, sys, threading

def signal_itself():
    sys.stdin.readline()
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

threading.Thread(target=signal_itself, daemon=True).start()
runpy.run_module("meshgate_worker", run_name="__main__", alter_sys=True)
"""
needs_identities = importlib.metadata.version("torchmonarch") >= "0.8"


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mg_") as directory:  # short: a socket's path is limited to 108 bytes
        yield Path(directory)


@pytest.fixture
def worker(directory: Path) -> Iterator[Worker]:
    worker = Worker(f"ipc://{directory}/host", "--grace=30")  # on a busy machine processes take their time to end
    yield worker
    worker.close()


@pytest.fixture
def client(worker: Worker) -> Iterator[Client]:
    client = Client(worker.address)
    yield client
    client.close()


def test_clients_can_attach_to_a_ready_host(worker: Worker, client: Client) -> None:
    assert worker.ready is not None
    assert worker.ready["address"] == worker.address
    assert len(client.pids) == 2
    assert client.run("call") == client.pids


def test_sigterm_ends_the_host_and_its_descendants(worker: Worker, client: Client) -> None:
    started = client.run("start")
    worker.process.send_signal(signal.SIGTERM)
    assert worker.wait() == (0, "meshgate_worker workers-0: ended: SIGTERM")
    wait_gone(*client.pids, *started)


def test_a_signal_that_another_thread_gets_ends_the_host(directory: Path) -> None:
    worker = Worker(f"ipc://{directory}/host", program=("-c", SIGNALS_ITSELF))
    assert worker.process.stdin is not None
    worker.process.stdin.write(b"\n")
    worker.process.stdin.flush()
    assert worker.wait() == (0, "meshgate_worker workers-0: ended: SIGTERM")
    worker.close()


def test_processes_go_on_after_the_notice_of_sigterm_and_the_host_ends_with_the_last(directory: Path) -> None:
    worker = Worker(f"ipc://{directory}/host", "--grace=30", "--notice=600")
    client = Client(worker.address)
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.stdout is not None
    told = next(line for line in worker.process.stdout if b"SIGTERM" in line)
    assert told == b"meshgate_worker workers-0: SIGTERM: continues for up to 600 s while something runs here\n"
    assert client.run("call") == client.pids
    for pid in client.pids:
        os.kill(pid, signal.SIGKILL)
    assert worker.wait() == (0, "meshgate_worker workers-0: ended: SIGTERM")
    client.close()
    worker.close()


def test_a_host_ends_when_the_time_of_its_notice_is_over(directory: Path) -> None:
    worker = Worker(f"ipc://{directory}/host", "--grace=30", "--notice=0.01")
    client = Client(worker.address)
    worker.process.send_signal(signal.SIGTERM)
    assert worker.wait() == (0, "meshgate_worker workers-0: ended: SIGTERM")
    wait_gone(*client.pids)
    client.close()
    worker.close()


def test_a_host_on_which_nothing_runs_needs_no_notice(directory: Path) -> None:
    worker = Worker(f"ipc://{directory}/host", "--grace=30", "--notice=600")
    worker.process.send_signal(signal.SIGTERM)
    assert worker.wait() == (0, "meshgate_worker workers-0: ended: SIGTERM")
    worker.close()


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="the system has no /proc")
def test_a_host_that_is_to_end_does_not_wait_for_sync_agents(directory: Path) -> None:
    """Every session has one on each of its hosts, also while it runs nothing there."""
    worker = Worker(f"ipc://{directory}/host", "--grace=30", "--notice=600")
    assert worker.ready is not None
    named = f"import sys; open('/proc/self/comm', 'w').write({SYNC_AGENT!r}); print(); sys.stdin.read()"
    environment = {**os.environ, COOKIE_VARIABLE: worker.ready["cookie"]}
    with subprocess.Popen(
        [sys.executable, "-c", named], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"\n"
        worker.process.send_signal(signal.SIGTERM)
        assert worker.wait() == (0, "meshgate_worker workers-0: ended: SIGTERM")
        assert agent.wait(DEADLINE) == -signal.SIGTERM
    worker.close()


def test_a_host_exits_with_the_process_that_started_it(worker: Worker, client: Client) -> None:
    started = client.run("start")
    worker.release()
    assert worker.wait() == (0, "meshgate_worker workers-0: ended: the process that started this host has exited")
    wait_gone(*client.pids, *started)


def test_the_monarch_processes_of_a_killed_host_exit(worker: Worker, client: Client) -> None:
    worker.process.kill()
    wait_gone(*client.pids)


def test_a_client_can_shut_the_host_down(worker: Worker, client: Client) -> None:
    client.run("shutdown")
    assert worker.wait() == (0, "meshgate_worker workers-0: ended: a client shut this host down")
    wait_gone(*client.pids)


def test_two_clients_can_use_one_host(worker: Worker, client: Client) -> None:
    other = Client(worker.address)
    assert not set(other.pids) & set(client.pids)
    other.close()
    assert client.run("call") == client.pids


def test_a_host_can_listen_on_another_address_than_the_advertised_one() -> None:
    port = free_port()
    worker = Worker(f"tcp://localhost:{port}@tcp://0.0.0.0:{port}")
    assert worker.ready is not None
    worker.close()


def test_variables_in_the_address_are_expanded(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", str(directory))
    worker = Worker("ipc://$WHERE/host")
    assert worker.ready is not None
    assert worker.ready["address"] == f"ipc://{directory}/host"
    worker.close()


def test_an_address_in_use_is_an_error(worker: Worker) -> None:
    second = Worker(worker.address)
    assert second.ready is None
    code, reason = second.wait()
    assert code == 2
    assert f"another process already serves {worker.address}" in reason
    second.close()
    assert worker.process.poll() is None


def test_the_stale_socket_of_a_killed_host_is_replaced(worker: Worker, directory: Path) -> None:
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
        ("nonsense", 2, "unsupported address 'nonsense'"),
        ("ipc:///nowhere/at/all", 1, "Monarch failed: ValueError: listen: unix:/nowhere/at/all No such file"),
    ],
)
def test_a_host_that_cannot_start_reports_why(address: str, code: int, reason: str) -> None:
    worker = Worker(address)
    assert worker.ready is None
    exit_code, last_line = worker.wait()
    assert exit_code == code
    assert reason in last_line
    worker.close()


def test_help_describes_every_option() -> None:
    help_text = subprocess.run(
        [sys.executable, "-m", "meshgate_worker", "--help"], capture_output=True, text=True, check=True
    )
    for option in ("--address", "--name", "--lifetime-fd", "--ready-fd", "--grace", "--notice", "--remove-directory"):
        assert option in help_text.stdout


def test_a_host_without_an_identity_serves_its_address() -> None:
    assert service_address(ADDRESS, None) == service_address(ADDRESS, "") == ADDRESS


def test_the_identity_comes_before_the_address_if_monarch_attaches_by_it() -> None:
    identity, _, rest = service_address(ADDRESS, UUID).partition("@")
    if needs_identities:
        assert identity.startswith("service<")
        assert rest == ADDRESS
    else:
        assert f"{identity}@{rest}" == ADDRESS


def test_equal_uuids_give_equal_identities() -> None:
    other = UUID.replace("9a41", "9a42")
    assert service_address(ADDRESS, UUID) == service_address(ADDRESS, UUID)
    assert (service_address(ADDRESS, UUID) != service_address(ADDRESS, other)) == needs_identities


def test_an_identity_that_is_not_a_uuid_is_rejected_if_it_is_used() -> None:
    refused = pytest.raises(ValueError, match="badly formed") if needs_identities else contextlib.nullcontext()
    with refused:
        service_address(ADDRESS, "workers-0")


@pytest.mark.parametrize(
    ("address", "family", "socket_address"),
    [
        ("ipc:///tmp/a", socket.AF_UNIX, "/tmp/a"),
        ("service<2MuAHeDjLCEd>@ipc:///tmp/a", socket.AF_UNIX, "/tmp/a"),
        ("tcp://10.0.0.1:26600", socket.AF_INET, ("10.0.0.1", 26600)),
        ("tcp://[fd00::1]:26600", socket.AF_INET6, ("fd00::1", 26600)),
        ("tcp://pod-0.svc:26600@tcp://0.0.0.0:26600", socket.AF_INET, ("127.0.0.1", 26600)),
        ("tcp://pod-0.svc:26600@tcp://[::]:26600", socket.AF_INET6, ("::1", 26600)),
        ("service<2MuAHeDjLCEd>@tcp://pod:1@tcp://0.0.0.0:2", socket.AF_INET, ("127.0.0.1", 2)),
    ],
)
def test_the_listening_socket_is_parsed_from_the_address(address: str, family: int, socket_address: object) -> None:
    assert listening_at(address) == ListeningAt(family, socket_address)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "address",
    ["", "ipc://", "ipc://@abstract", "tcp://", "tcp://host", "tcp://:1", "tcp://h:x", "tcp://h:99999", "h:1"],
)
def test_an_unsupported_address_raises(address: str) -> None:
    with pytest.raises(AddressError) as error:
        listening_at(address)
    assert repr(address) in str(error.value)


def test_accepts_is_true_only_while_a_process_listens(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    listening = listening_at(f"ipc://{path}")
    assert not listening.accepts(1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        assert not listening.accepts(1)
        listener.listen()
        assert listening.accepts(1)
    assert not listening.accepts(1)


def test_clear_removes_a_stale_socket_and_its_directory_if_empty(tmp_path: Path) -> None:
    directory = tmp_path / "hosts"
    directory.mkdir()
    for name in "ab":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(directory / name))
    listening_at(f"ipc://{directory}/a").clear(directory=True)
    assert [path.name for path in directory.iterdir()] == ["b"]
    listening_at(f"ipc://{directory}/b").clear()
    assert directory.exists()
    listening_at(f"ipc://{directory}/b").clear(directory=True)
    assert not directory.exists()
