"""Commands, terminals and ports on real hosts, also through cuts of the connection."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import inspect
import io
import json
import os
import pty
import re
import select
import signal
import socket
import socketserver
import struct
import subprocess
import sys
import termios
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import pytest

import meshgate as kt
from meshgate import ProcessJob
from meshgate.errors import JobError
from meshgate.ranks.debug import debugging, run_console
from meshgate.ranks.exec import execute
from meshgate.ranks.forward import forward
from meshgate.testing import NetworkProxy
from tests.end_to_end.actors import AsyncStopping, Stopping, Worker
from tests.waiting import Printed, wait_for


@pytest.fixture
def proxy(job: Any) -> Iterator[NetworkProxy]:
    with NetworkProxy("127.0.0.1", urlsplit(job.gateway_url).port) as proxy:
        yield proxy


@pytest.fixture
def proxied(job: Any, proxy: NetworkProxy) -> Iterator[Any]:
    """The hosts, in a session whose connection goes through the proxy."""
    client = kt.Client(kt.UrlDialer(f"ws://127.0.0.1:{proxy.port}", job._gateway.record.token))
    with client:
        yield client.attach_hosts("workers", 2)


@pytest.mark.usefixtures("hosts")
def test_a_command_runs_on_the_chosen_hosts(job: ProcessJob) -> None:
    command = ["sh", "-c", "echo $MESHGATE_HOST_NAME; echo $A >&2; exit $B"]
    both = job.exec(command, env={"A": "a", "B": "0"}, capture_output=True)
    assert [(result.host, result.stdout, result.stderr) for result in both] == [
        (f"workers-{rank}", f"workers-{rank}\n", "a\n") for rank in range(2)
    ]
    one = job.exec(command, ranks=1, env={"B": "3"}, capture_output=True)
    assert (one.returncode, list(one.results)) == (3, [1])


@pytest.mark.usefixtures("hosts")
def test_a_command_reads_input_and_prints_as_it_goes(job: ProcessJob, capsysbinary: Any) -> None:
    assert job.exec(["cat"], ranks=0, stdin=io.BytesIO(b"in\xff")).returncode == 0
    assert capsysbinary.readouterr().out == b"in\xff"


@pytest.fixture
def endless() -> Iterator[tuple[IO[bytes], int]]:
    """An input that has nothing yet and does not end, and the descriptor to write to it."""
    reading, writing = os.pipe()
    with open(reading, "rb") as file:
        yield file, writing
    os.close(writing)


@pytest.mark.usefixtures("hosts")
def test_a_command_ends_before_its_input_and_leaves_the_rest(job: ProcessJob, endless: Any, capfd: Any) -> None:
    stdin, writing = endless
    assert job.exec(["sh", "-c", "echo early; exit 3"], ranks=0, stdin=stdin, timeout=60).returncode == 3
    assert capfd.readouterr().out == "early\n"
    os.write(writing, b"later")
    assert stdin.read1(10) == b"later"


@pytest.mark.usefixtures("hosts")
def test_a_timeout_holds_while_input_is_read(job: ProcessJob, endless: Any) -> None:
    with pytest.raises(TimeoutError, match=r"sleep did not end within 0\.1 s on rank 0; it was ended"):
        job.exec(["sleep", "1000"], ranks=0, stdin=endless[0], timeout=0.1)


@pytest.mark.usefixtures("hosts")
def test_each_command_has_the_whole_input_in_order(job: ProcessJob, tmp_path: Path) -> None:
    data = os.urandom(5_000_000)
    (tmp_path / "input").write_bytes(data)
    with open(tmp_path / "input", "rb") as stdin:
        found = job.exec(["sha256sum"], stdin=stdin, capture_output=True)
    assert [result.stdout.split()[0] for result in found] == [hashlib.sha256(data).hexdigest()] * 2


@pytest.mark.usefixtures("hosts")
def test_a_command_that_closes_its_input_does_not_hold_up_the_others(job: ProcessJob, tmp_path: Path) -> None:
    closes = f"exec <&-; while [ ! -e {tmp_path}/read ]; do sleep 0.05; done"
    script = f"if [ $MESHGATE_HOST_NAME = workers-0 ]; then {closes}; else wc -c; touch {tmp_path}/read; fi"
    found = job.exec(["sh", "-c", script], stdin=io.BytesIO(bytes(4_000_000)), capture_output=True, timeout=60)
    assert found[1].stdout.strip() == "4000000"


@pytest.mark.usefixtures("hosts")
def test_an_input_that_cannot_be_read_ends_the_command(job: ProcessJob) -> None:
    class Broken(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        job.exec(["sleep", "1000"], ranks=0, stdin=Broken())  # type: ignore[arg-type]


@pytest.mark.usefixtures("hosts")
def test_a_command_that_takes_too_long_is_ended(job: ProcessJob) -> None:
    with pytest.raises(TimeoutError, match=r"sleep did not end within 0\.1 s on rank 0, rank 1; it was ended"):
        job.exec(["sleep", "1000"], timeout=0.1)


def test_a_command_survives_cuts_and_loses_nothing(proxied: Any, proxy: NetworkProxy) -> None:
    for direction in ("down", "up", "down"):
        proxy.cut_after(100_000, direction)
        result = execute(proxied, ["seq", "1", "100000"], 0, capture=True)
        assert result[0].stdout == "".join(f"{number}\n" for number in range(1, 100_001))


def test_stacks_show_what_busy_processes_run(job: ProcessJob, hosts: Any) -> None:
    procs = hosts.spawn_procs(name="stuck")
    pending = procs.spawn("stuck", Worker).hang.call()

    def stuck() -> bool:
        found = [each for each in job.stacks() if each.mesh == "stuck"]
        return len(found) == 2 and all("hang" in str(each.busy[:1]) for each in found)

    wait_for(stuck, "the stuck call")
    wait_for(lambda: "stuck ranks 0-1 (2 processes):" in str(job.stacks()), "both ranks in one group")
    assert [each.rank for each in job.stacks(ranks=1) if each.mesh == "stuck"] == [1]
    procs.stop().get()
    assert pending.exception() is not None


def test_a_future_that_times_out_says_which_ranks_it_waits_for(hosts: Any) -> None:
    procs = hosts.spawn_procs(name="late")
    workers = procs.spawn("late", Worker)
    workers.rank.call().get()
    pending = workers.hang_if.call([1])
    text = "1 of 2 ranks answered; rank 1 on workers-1 has run hang_if for"
    wait_for(lambda: text in repr(pending), text)
    with pytest.raises(TimeoutError, match=r"1 of 2 ranks answered; rank 1 on workers-1 has run hang_if for \d"):
        pending.get(timeout=0)
    procs.stop().get()
    assert pending.exception() is not None
    assert repr(pending) == "<FutureProxy done>"


@contextlib.contextmanager
def echo_server() -> Iterator[int]:
    """Sends back what it receives; yields its port."""

    class Echo(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while data := self.request.recv(65536):
                self.request.sendall(data)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield server.server_address[1]
        server.shutdown()
        serving.join()


def echoed(port: int, data: bytes) -> bytes:
    """What comes back from ``port`` for ``data``, up to the end of the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:

        def send() -> None:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        received = b""
        while more := connection.recv(65536):
            received += more
        sender.join()
    return received


# The hosts of a ProcessJob are on this machine, so one server serves as a host's and as the laptop's.


@pytest.mark.parametrize("reverse", [False, True])
def test_a_port_is_forwarded_in_both_directions(proxied: Any, proxy: NetworkProxy, reverse: bool) -> None:
    data = os.urandom(3_000_000)
    found: list[bytes] = []
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(echo_server())
        ports = {"port": 0, "local_port": server} if reverse else {"port": server, "local_port": None}
        forwarded = stack.enter_context(forward(proxied, rank=1, reverse=reverse, **ports))
        proxy.cut_after(500_000, "down")
        others = [threading.Thread(target=lambda: found.append(echoed(forwarded.port, b"small"))) for _ in range(8)]
        for other in others:
            other.start()
        assert echoed(forwarded.port, data) == data
        for other in others:
            other.join()
        assert found == [b"small"] * 8
        forwarded.close()
        if not reverse:  # on the host the listener ends with its process, a moment later
            with pytest.raises(ConnectionRefusedError):
                echoed(forwarded.port, b"")


def test_a_port_that_nothing_answers_or_that_is_taken(proxied: Any) -> None:
    with echo_server() as server:
        for reverse in (False, True):
            ports = {"port": server, "local_port": 1} if reverse else {"port": 1, "local_port": server}
            with pytest.raises(JobError, match=f"cannot listen on port {server}"):
                forward(proxied, rank=0, reverse=reverse, **ports)
    with forward(proxied, server, 0, local_port=None, reverse=False) as forwarded:
        assert echoed(forwarded.port, b"") == b""


SHELL = """
import sys
import meshgate as kt
from meshgate.ranks.exec import run_shell
with kt.Client(kt.UrlDialer(sys.argv[1], sys.argv[2])) as client:
    code = run_shell(client.attach_hosts("workers", 2), 1, ["sh"], env={"PS1": "ready> "})
sys.exit(code)
"""


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, *command: str) -> None:
        self.ours, theirs = pty.openpty()
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
        os.close(theirs)
        self.seen = b""

    def type(self, keys: bytes) -> None:
        os.write(self.ours, keys)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process.send_signal(signal.SIGWINCH)

    def until(self, text: bytes) -> None:
        """Reads until ``text``; later calls begin after it."""
        while text not in self.seen:
            readable, _, _ = select.select([self.ours], [], [], 60)
            assert readable, self.seen
            self.seen += os.read(self.ours, 65536)
        self.seen = self.seen.partition(text)[2]


@contextlib.contextmanager
def shell(*command: str) -> Iterator[Terminal]:
    terminal = Terminal(*command)
    try:
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.ours)


def test_a_terminal_survives_ten_cuts_and_passes_keys_signals_and_its_size(job: Any, proxy: NetworkProxy) -> None:
    url = f"ws://127.0.0.1:{proxy.port}"
    with shell(sys.executable, "-c", SHELL, url, job._gateway.record.token) as terminal:
        terminal.until(b"ready> ")
        for number in range(10):
            terminal.type(b"echo $((%d * 1000 + 7))\r" % (number + 1))
            proxy.cut()
            terminal.until(b"%d007\r\n" % (number + 1))
        terminal.resize(50, 132)
        terminal.type(b"while [ \"$(stty size)\" != '50 132' ]; do :; done; echo resi''zed\r")
        terminal.until(b"resized\r\n")
        # Between its start by the shell and its exec, a program may lose the signal.
        terminal.type(b"sh -c 'echo sle\"\"eping; exec sleep 1000'\r")
        terminal.until(b"sleeping\r\n")
        terminal.type(b"\x03")
        terminal.until(b"ready> ")
        terminal.type(b"echo co''de=$?; exit 5\r")
        terminal.until(b"code=130\r\n")
        assert terminal.process.wait(timeout=60) == 5


def test_a_breakpoint_waits_for_a_debugger_and_continues(hosts: Any, printed: Printed) -> None:
    procs = hosts.spawn_procs(name="stopping")
    stopping = procs.spawn("stopping", Stopping)
    pending, waiting = stopping.double.call(3), procs.spawn("waiting", AsyncStopping).echo.call(4)
    with debugging(hosts) as debugger:
        wait_for(lambda: len(debugger.stopped()) == 4, "4 stopped processes")
        lines = iter(
            ["attach stopping 1", "p value", "value = 50", "c", "cast waiting ranks(0) value = 60", "continue"]
        )
        shown: list[str] = []

        def read(prompt: str) -> str:
            line = next(lines, None)
            if line is None:
                raise EOFError
            return line

        run_console(debugger, read, shown.append)
    assert list(pending.get(timeout=60).values()) == [6, 100]
    assert list(waiting.get(timeout=60).values()) == [60, 4]
    assert "3\n(Pdb) " in "".join(shown)
    wait_for(lambda: "stopping rank 0 has stopped at " in printed.err, "the announcement")
    procs.stop().get()


def test_a_debugger_session_survives_ten_cuts(proxied: Any, proxy: NetworkProxy) -> None:
    procs = proxied.slice(hosts=0).spawn_procs(name="cut")
    pending = procs.spawn("cut", Stopping).double.call_one(3)
    with debugging(proxied) as debugger:
        wait_for(lambda: len(debugger.stopped()) == 1, "a stopped process")
        lines = iter(["attach cut 0", *(f"p value * {number * 1000}" for number in range(10)), "value = 50", "c"])
        shown: list[str] = []

        def read(prompt: str) -> str:
            line = next(lines, None)
            if line is None:
                raise EOFError
            if line.startswith("p "):
                proxy.cut()
            return line

        run_console(debugger, read, shown.append)
    assert pending.get(timeout=60) == 100
    assert re.findall(r"(\d+)\n\(Pdb\) ", "".join(shown))[1:] == [str(number * 3000) for number in range(10)]


class Editor:
    """Speaks the Debug Adapter Protocol."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._messages = self._socket.makefile("rb")

    def close(self) -> None:
        self._messages.close()
        self._socket.close()

    def request(self, command: str, **arguments: Any) -> None:
        body = json.dumps({"seq": 1, "type": "request", "command": command, "arguments": arguments}).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)

    def until(self, name: str) -> Any:
        """The body of the next event or response of this name."""
        while True:
            size = 0
            while line := self._messages.readline().strip():
                size = int(line.partition(b":")[2])
            message = json.loads(self._messages.read(size))
            if name in (message.get("event"), message.get("command")):
                return message.get("body")


def test_an_editor_attaches_to_a_process_and_its_breakpoint_hits(job: ProcessJob, hosts: Any) -> None:
    pytest.importorskip("debugpy")
    procs = hosts.spawn_procs(name="edited")
    workers = procs.spawn("edited", Worker)
    workers.add.call(1).get()
    source, first = inspect.getsourcelines(Worker.add._method)
    line = first + next(index for index, text in enumerate(source) if "self.total +=" in text)
    debugging = job.debug(rank=1, procs="edited")
    assert debugging is not None
    with debugging, contextlib.closing(Editor(debugging.port)) as editor:
        editor.request("initialize", clientID="test", adapterID="debugpy", pathFormat="path", linesStartAt1=True)
        editor.until("initialize")
        editor.request("attach", justMyCode=False)
        editor.until("initialized")
        editor.request("setBreakpoints", source={"path": inspect.getsourcefile(Worker)}, breakpoints=[{"line": line}])
        editor.until("setBreakpoints")
        editor.request("configurationDone")
        editor.until("attach")
        pending = workers.add.call(1)
        stopped = editor.until("stopped")
        editor.request("stackTrace", threadId=stopped["threadId"])
        frame = editor.until("stackTrace")["stackFrames"][0]
        editor.request("setBreakpoints", source={"path": inspect.getsourcefile(Worker)}, breakpoints=[])
        editor.request("continue", threadId=stopped["threadId"])
        assert list(pending.get(timeout=60).values()) == [2, 2]
    assert (frame["name"], frame["line"]) == ("add", line)
    procs.stop().get()
    with pytest.raises(JobError, match="no process has rank 9"):
        job.debug(rank=9, procs="edited")


def test_monarchs_admin_server_is_reached_from_here(job: ProcessJob, procs: Any) -> None:
    procs.initialized.get()
    try:
        url = job.enable_admin().state().admin_url
        with urllib.request.urlopen(f"{url}/v1/tree", timeout=60) as answer:
            assert "anon-3" in answer.read().decode()
        assert job.state().admin_url == url
    finally:
        job._close_services()
        job._admin = None
