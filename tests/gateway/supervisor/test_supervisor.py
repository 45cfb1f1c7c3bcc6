"""The supervisor, with real gateways whose servers are killed: what outlives a server, and what ends with all."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from meshgate_gateway.supervisor.supervisor import command_with_descriptors, receive_message, send_message
from tests.gateway.server_process import TOKEN, ServerProcess, request, wait_gone


def kill_server(server: ServerProcess, generation: int) -> dict[str, Any]:
    """Kills the server process, and waits until its successor serves. ``generation``: the servers so far."""
    servers = server.wait_logged_times("serving", generation)
    os.kill(servers[-1]["pid"], signal.SIGKILL)
    return server.wait_logged_times("serving", generation + 1)[-1]


def test_a_session_and_its_connection_outlive_the_server() -> None:
    session = uuid.uuid4().hex
    with ServerProcess() as server:
        with server.join(session) as connection:
            pid = connection.command("describe")["pid"]
            kill_server(server, 1)
            assert connection.command("describe")["pid"] == pid
        with server.join(session, resume=True) as connection:
            assert connection.command("describe")["pid"] == pid
        server.wait_logged("the server was replaced", predecessor="was killed by SIGKILL")
    assert server.wait() == 0
    wait_gone(pid)


def test_a_session_outlives_many_servers() -> None:
    session = uuid.uuid4().hex
    with ServerProcess() as server:
        with server.join(session) as connection:
            pid = connection.command("describe")["pid"]
        for generation in range(1, 4):
            kill_server(server, generation)
            with server.join(session, resume=True) as connection:
                assert connection.command("describe")["pid"] == pid


def test_a_server_that_ends_with_an_error_is_replaced_as_well() -> None:
    session = uuid.uuid4().hex
    with ServerProcess() as server, server.join(session) as connection:
        os.kill(server.wait_logged("serving")["pid"], signal.SIGABRT)
        server.wait_logged("the server was replaced", predecessor="was killed by SIGABRT")
        assert connection.command("describe")


def test_connections_made_while_there_is_no_server_are_served_by_the_next() -> None:
    with ServerProcess() as server:
        pid = server.wait_logged("serving")["pid"]
        os.kill(pid, signal.SIGSTOP)
        connection = server.connect()
        connection.send(request("/healthz"))
        os.kill(pid, signal.SIGKILL)
        assert connection.http().status == 200
        connection.close()


def test_a_session_of_another_identity_stays_forbidden_and_the_limit_holds_after_a_restart() -> None:
    with ServerProcess("--max-sessions", "1") as server, server.join():
        kill_server(server, 1)
        answer = server.failed()
        assert (answer.status, "--max-sessions" in answer.error) == (503, True)


def test_why_a_session_ended_is_known_to_the_next_server() -> None:
    session = uuid.uuid4().hex
    with ServerProcess() as server:
        with server.join(session) as connection:
            connection.command("print the last words")
            connection.send(b"kill\n")
            assert connection.closed_by_peer()
        before = server.failed(session, resume=True).body
        kill_server(server, 1)
        assert server.failed(session, resume=True).body == before
        assert "SIGKILL" in before["reason"]
        assert "the last words" in before["output"]


def test_an_engine_that_dies_without_a_server_is_reported_by_the_next() -> None:
    session = uuid.uuid4().hex
    with ServerProcess() as server:
        with server.join(session) as connection:
            engine = connection.command("describe")["pid"]
            server.wait_logged("session connected")
            pid = server.wait_logged("serving")["pid"]
            os.kill(pid, signal.SIGSTOP)
            os.kill(engine, signal.SIGKILL)
            wait_gone(engine)
            os.kill(pid, signal.SIGKILL)
            assert connection.closed_by_peer()  # only now: the server may not have closed its copy before it stopped
        answer = server.failed(session, resume=True)
        assert (answer.status, answer.body["kind"]) == (410, "died")
        assert "SIGKILL" in answer.body["reason"]


def test_a_lease_that_began_under_one_server_expires_under_the_next() -> None:
    session = uuid.uuid4().hex
    with ServerProcess("--lease", "8") as server:
        with server.join(session) as connection:
            pid = connection.command("describe")["pid"]
        server.wait_logged("session disconnected", session=session)
        kill_server(server, 1)
        server.wait_logged("session ended", session=session, kind="expired")
        wait_gone(pid)


def test_a_prestarted_engine_is_used_by_the_next_server() -> None:
    with ServerProcess() as server:
        with server.join() as first:  # whatever was prestarted is in use now
            assert first.command("describe")
        kill_server(server, 1)
        with server.join() as second:
            pid = second.command("describe")["pid"]
        kill_server(server, 2)
        with server.join() as third:
            assert third.command("describe")["pid"] != pid


def test_hosts_outlive_the_server_and_their_losses_meanwhile_are_reported() -> None:
    with ServerProcess("--local-mesh", "workers=2", "--log-level", "debug") as server, server.join() as connection:
        ready = [server.wait_logged("host ready", host=f"workers-{rank}") for rank in range(2)]
        before = connection.command("hosts workers")["hosts"]
        kill_server(server, 1)
        assert connection.command("hosts workers")["hosts"] == before
        pid = server.wait_logged_times("serving", 2)[-1]["pid"]
        os.kill(pid, signal.SIGSTOP)
        for host in ready:
            os.kill(host["pid"], signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
        for rank in range(2):
            server.wait_logged("host ended", host=f"workers-{rank}", reason="was killed by SIGKILL")
        assert "was killed by SIGKILL" in connection.command("hosts workers")["error"]
    wait_gone(*(host["pid"] for host in ready))


def test_the_local_socket_serves_and_is_removed_after_a_restart() -> None:
    with ServerProcess("--local-socket") as server:
        path = Path(server.announcement["socket"])
        kill_server(server, 1)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(request("/healthz"))
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK\r\n")
    assert not path.parent.exists()


def test_a_detached_gateway_stays_detached_and_one_that_is_not_ends_with_its_driver() -> None:
    with ServerProcess("--idle-timeout", "600") as server, server.join() as connection:
        os.write(server.lifetime, b"\n")
        os.close(server.lifetime)
        server.lifetime = -1
        assert connection.command("describe")
        server.ask("/healthz")
        kill_server(server, 1)
        assert server.ask("/v1/job", token=TOKEN).body["sessions"] == 1
    with ServerProcess() as server:
        kill_server(server, 1)
        os.close(server.lifetime)
        server.lifetime = -1
        assert server.wait() == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_everything_ends_with_the_gateway_after_a_restart(signum: signal.Signals) -> None:
    with ServerProcess("--local-mesh", "workers=1", "--log-level", "debug") as server, server.join() as connection:
        host = server.wait_logged("host ready")["pid"]
        engine = connection.command("describe")["pid"]
        successor = kill_server(server, 1)["pid"]
        server.process.send_signal(signum)
        server.wait()
        wait_gone(successor, engine, host)


FAILING = """
import sys
from meshgate_gateway.supervisor import supervisor
from meshgate_gateway.supervisor.supervisor import send_message

def serve(inheritance):
    if sys.argv[1] == "serving":
        send_message(inheritance.link, {"type": "serving"})
    print("server", inheritance.predecessor)
    sys.exit(3)

supervisor.FIRST_DELAY = 0.001
supervisor.supervise(serve)
"""


def run_failing(when: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", FAILING, when], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_servers_that_keep_failing_are_given_up() -> None:
    code, output, errors = run_failing("serving")
    assert code == 3
    assert output.splitlines() == ["server None", *["server ended with exit code 3"] * 9]
    assert "giving up: 10 servers in a row failed, the last ended with exit code 3" in errors


def test_a_gateway_that_cannot_start_is_not_started_again() -> None:
    assert run_failing("starting") == (3, "server None\n", "")


def test_a_server_collects_garbage() -> None:
    program = """
import gc
from meshgate_gateway.supervisor.supervisor import supervise

gc.disable()  # as the program does while it imports
supervise(lambda inheritance: print(gc.isenabled()))
"""
    assert subprocess.check_output([sys.executable, "-c", program], text=True, timeout=60) == "True\n"


def test_a_server_gone_in_the_middle_of_a_request_is_replaced() -> None:
    program = """
import os, signal
from meshgate_gateway.supervisor import supervisor
from meshgate_gateway.supervisor.supervisor import send_message

def serve(inheritance):
    if inheritance.predecessor is None:
        send_message(inheritance.link, {"type": "serving"})
        inheritance.link.sendall(b"\\0\\0")
        os.kill(os.getpid(), signal.SIGKILL)
    print(inheritance.predecessor)

supervisor.supervise(serve)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "was killed by SIGKILL\n", "")


def test_a_message_arrives_with_its_descriptors() -> None:
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    with ours, theirs:
        send_message(ours, {"type": "keep", "note": {"text": "x" * 100_000}}, [write])
        received = receive_message(theirs)
        assert received is not None
        message, (descriptor,) = received
        assert message == {"type": "keep", "note": {"text": "x" * 100_000}}
        os.write(descriptor, b"through the copy")
        assert os.read(read, 100) == b"through the copy"
    for each in (read, write, descriptor):
        os.close(each)


def test_a_peer_that_ends_between_or_within_messages_is_gone() -> None:
    for sent in (b"", b"\0\0", b"\0\0\0\x09{}"):
        ours, theirs = socket.socketpair()
        with theirs:
            with ours:
                ours.sendall(sent)
            assert receive_message(theirs) is None


def test_descriptors_replace_their_places_in_a_command() -> None:
    command = ["engine", "--control-fd", "fd:0", "--other", "fd:1", "fd:2"]
    assert command_with_descriptors(command, [7, 9]) == ["engine", "--control-fd", "7", "--other", "9", "fd:2"]
