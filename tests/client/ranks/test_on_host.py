"""The actors that run commands on a host, used here without a host."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from meshgate.ranks import on_host
from meshgate.ranks.on_host import PROCESS, STDERR, STDIN, STDOUT, AdminStarter, StreamReader, StreamWriter
from meshgate.ranks.streams import Event, Hub
from meshgate.session.futures import FutureProxy

host_mesh: Any = pytest.importorskip("monarch._src.actor.host_mesh")


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    hub = Hub()
    monkeypatch.setattr(on_host, "_hub", hub)
    monkeypatch.setenv("MESHGATE_HOST_NAME", "workers-1")
    yield StreamWriter()
    hub.close()


def do(writer: Any, name: str, *arguments: Any) -> Any:
    return getattr(StreamWriter, name)._method(writer, *arguments)


def read(reader: Any) -> list[Event]:
    return [Event(*event) for event in StreamReader.read._method(reader)[1]]


def until_exit() -> tuple[dict[int, bytes], Event]:
    """The output by stream, and the event that ended the command."""
    reader, output = StreamReader(), {STDIN: b"", STDOUT: b"", STDERR: b""}
    while True:
        for event in read(reader):
            if event.stream == PROCESS:
                return output, event
            output[event.stream] += event.data


def test_a_command_has_the_environment_and_a_directory(writer: Any, tmp_path: Any) -> None:
    assert do(writer, "host") == "workers-1"
    do(
        writer,
        "run",
        ["sh", "-c", "echo $A $MESHGATE_HOST_NAME; pwd; echo e >&2; exit 3"],
        {"A": "b"},
        str(tmp_path),
        False,
    )
    output, event = until_exit()
    assert output[STDOUT] == f"b workers-1\n{tmp_path}\n".encode()
    assert output[STDERR] == b"e\n"
    assert (event.kind, event.number) == ("exit", 3)


def test_a_command_reads_its_input(writer: Any) -> None:
    do(writer, "run", ["cat"], {}, None, True)
    do(writer, "write", STDIN, b"input")
    do(writer, "write", STDIN, b"")
    output, event = until_exit()
    assert (output[STDOUT], event.number) == (b"input", 0)


@pytest.mark.parametrize(
    ("command", "workdir", "code", "text"),
    [
        (["no-such-command"], None, 127, "cannot run no-such-command: No such file or directory"),
        (["/"], None, 126, "cannot run /: Permission denied"),
        (["true"], "/nowhere", 127, "cannot run the working directory /nowhere: No such file or directory"),
    ],
)
def test_a_command_that_cannot_start_says_why(
    writer: Any, command: list[str], workdir: str | None, code: int, text: str
) -> None:
    do(writer, "run", command, {}, workdir, False)
    _, event = until_exit()
    assert (event.kind, event.number, event.data.decode()) == ("failed", code, text)


@pytest.mark.parametrize(
    ("command", "env", "workdir", "text"),
    [
        (["echo", "\0"], {}, None, "cannot run 'echo': embedded null byte"),
        (["\ud800"], {}, None, r"cannot run '\ud800': 'utf-8' codec can't encode"),
        (["echo"], {"A=B": "1"}, None, "cannot run 'echo': illegal environment variable name"),
        (["echo"], {"A": 1}, None, "cannot run 'echo': expected str, bytes or os.PathLike object, not int"),
        (["echo"], {}, "\0", "cannot run 'echo': embedded null byte"),
    ],
)
def test_what_no_process_can_be_started_with_is_an_answer(
    writer: Any, command: list[str], env: dict[str, Any], workdir: str | None, text: str
) -> None:
    do(writer, "run", command, env, workdir, False)
    _, event = until_exit()
    assert (event.kind, event.number) == ("failed", 126)
    assert event.data.decode().startswith(text)


def test_a_signal_reaches_the_command_and_is_in_its_exit_code(writer: Any) -> None:
    do(writer, "run", ["sh", "-c", "sleep 100 & echo up; wait"], {}, None, False)
    assert read(StreamReader())[0].data == b"up\n"
    do(writer, "signal", int(signal.SIGTERM))
    _, event = until_exit()
    assert event.number == 128 + signal.SIGTERM
    do(writer, "signal", int(signal.SIGTERM))  # it has ended


def test_a_signal_to_a_command_that_has_just_ended_leaves_its_exit_code(
    writer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[Any] = []
    watch = on_host._watch
    monkeypatch.setattr(on_host, "_watch", lambda *arguments: watched.append(arguments))
    do(writer, "run", ["sh", "-c", "exit 3"], {}, None, False)
    os.waitid(os.P_PID, writer._process.pid, os.WEXITED | os.WNOWAIT)
    do(writer, "signal", int(signal.SIGTERM))
    watch(*watched[0])
    _, event = until_exit()
    assert event.number == 3


def test_a_terminal_has_a_size_and_edits_lines(writer: Any) -> None:
    code = "import os, sys; print(os.isatty(0), os.get_terminal_size()); input(); print(os.get_terminal_size())"
    do(writer, "open_terminal", [sys.executable, "-c", code], {}, None, 24, 80)
    seen = b""
    while b"lines=24" not in seen:
        seen += b"".join(event.data for event in read(StreamReader()))
    assert b"True os.terminal_size(columns=80, lines=24)" in seen
    do(writer, "resize", 50, 132)
    do(writer, "write", STDIN, b"go\r")
    output, event = until_exit()
    assert b"columns=132, lines=50" in output[STDIN]
    assert event.number == 0
    do(writer, "resize", 1, 1)


def test_ports_are_forwarded_to_and_from_loopback(writer: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as service:
        do(writer, "connect", 7, service.getsockname()[1])
        accepted, _ = service.accept()
        with accepted:
            accepted.sendall(b"hello")
            reader = StreamReader()
            assert read(reader) == [Event(7, "data", b"hello")]
            do(writer, "ack", 7, 5)
            do(writer, "close_stream", 7)
            assert accepted.recv(1) == b""
    port = do(writer, "listen", 2, 0)
    assert isinstance(port, int)
    assert "Address already in use" in do(writer, "listen", 4, port)


@pytest.fixture
def stdout() -> Iterator[None]:
    """The actor silences its process, which is the test's."""
    kept = os.dup(1)
    yield
    os.dup2(kept, 1)
    os.close(kept)


@pytest.mark.usefixtures("stdout")
def test_it_returns_the_url_or_what_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def spawn_admin(meshes: Any, admin_addr: str) -> FutureProxy[Any]:
        if admin_addr.endswith(":80"):
            return FutureProxy.failed(RuntimeError("permission denied"))
        return FutureProxy.resolved((f"http://{admin_addr}", "reference"))

    monkeypatch.setattr(host_mesh, "_spawn_admin", spawn_admin)
    start = AdminStarter.start._method
    assert start(AdminStarter(), [], "localhost:5678") == ("http://localhost:5678", "")
    assert start(AdminStarter(), [], "localhost:80") == ("", "permission denied")
