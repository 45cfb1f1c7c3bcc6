"""The server's side of the link: what it asks of the supervisor, which here is the other end of a socket pair."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from meshgate_gateway.supervisor.link import SupervisorLink
from meshgate_gateway.supervisor.supervisor import Inheritance, KeptDescriptors, receive_message, send_message

TIMEOUT = 30.0


@dataclass
class Supervisor:
    """The supervisor's end."""

    socket: socket.socket
    link: SupervisorLink

    def received(self) -> tuple[dict[str, Any], list[int]]:
        message = receive_message(self.socket)
        assert message is not None
        return message


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    near, far = socket.socketpair()
    far.settimeout(TIMEOUT)
    kept = {"ended": KeptDescriptors(note={"reason": "idle"})}
    with near, far:
        yield Supervisor(far, SupervisorLink(Inheritance(near, os.getpid(), {}, kept, "was killed by SIGKILL")))


def test_what_the_last_server_left_is_known(supervisor: Supervisor) -> None:
    assert supervisor.link.predecessor == "was killed by SIGKILL"
    assert supervisor.link.kept["ended"].note == {"reason": "idle"}
    assert supervisor.link.children == {}


def test_a_process_is_started_with_its_descriptors_and_reports_its_exit(supervisor: Supervisor) -> None:
    async def exit_code() -> int:
        exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        process.on_exit(exited.set_result)
        os.write(status_writer, b"3")
        os.close(status_writer)
        return await asyncio.wait_for(exited, TIMEOUT)

    output, output_writer = os.pipe()
    status, status_writer = os.pipe()
    send_message(supervisor.socket, {"pid": 17}, [output, status])
    process = supervisor.link.start("engine-1", {"session": "a"}, ["run", "fd:0"], {"A": "1"}, [0], [1])
    request, descriptors = supervisor.received()
    assert (request["type"], request["key"], request["note"]) == ("start", "engine-1", {"session": "a"})
    assert (request["command"], request["environment"], request["passed"]) == (["run", "fd:0"], {"A": "1"}, 1)
    assert (len(descriptors), process.pid) == (2, 17)
    assert asyncio.run(exit_code()) == 3
    for descriptor in (*descriptors, output, output_writer, status, process.output):
        os.close(descriptor)


def test_a_process_that_cannot_be_started_raises_the_supervisors_error(supervisor: Supervisor) -> None:
    send_message(supervisor.socket, {"error": [2, "No such file or directory"]})
    with pytest.raises(FileNotFoundError, match="No such file"):
        supervisor.link.start("engine-1", {}, ["missing"], {})


def test_requests_arrive_in_order(supervisor: Supervisor) -> None:
    supervisor.link.serving()
    supervisor.link.keep("ended", {"reason": "lease"})
    supervisor.link.drop("ended")
    supervisor.link.request("signal", "engine-1", signal=int(signal.SIGTERM))
    assert [supervisor.received()[0] for _ in range(4)] == [
        {"type": "serving", "key": ""},
        {"type": "keep", "key": "ended", "note": {"reason": "lease"}},
        {"type": "drop", "key": "ended"},
        {"type": "signal", "key": "engine-1", "signal": 15},
    ]


def test_a_server_ends_at_once_if_its_supervisor_has_ended() -> None:
    code = """
        import asyncio, os, socket, sys
        from meshgate_gateway.supervisor.link import SupervisorLink
        from meshgate_gateway.supervisor.supervisor import Inheritance
        async def serve():
            link = SupervisorLink(Inheritance(socket.socket(fileno=int(sys.argv[1])), os.getppid(), {}, {}, None))
            link.watch()
            print("serving", flush=True)
            await asyncio.sleep(3600)
        asyncio.run(serve())
    """
    near, far = socket.socketpair()
    source = "\n".join(line[8:] for line in code.splitlines())
    command = [sys.executable, "-c", source, str(near.fileno())]
    with far, subprocess.Popen(command, pass_fds=[near.fileno()], stdout=subprocess.PIPE, text=True) as server:
        near.close()
        assert server.stdout is not None
        assert server.stdout.readline() == "serving\n"
        far.close()
        assert server.wait(TIMEOUT) == 1
