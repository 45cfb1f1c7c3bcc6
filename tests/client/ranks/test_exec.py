"""Commands on hosts, with events in place of hosts. Real ones are in tests/end_to_end/test_ranks.py."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import queue
import resource
import signal
import struct
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from typing import IO, Any

import pytest

from meshgate.errors import GatewayLostError
from meshgate.ranks.exec import (
    LOST,
    MAX_LINE,
    CommandResult,
    Executed,
    _forwarding_input,
    _Input,
    _on_resize,
    _raw,
    _Running,
    _show_output,
    _size,
    execute,
    run_shell,
)
from meshgate.ranks.host_streams import HostStreams
from meshgate.ranks.on_host import PROCESS, STDERR, STDIN, STDOUT
from meshgate.ranks.streams import WINDOW
from meshgate.session.futures import FutureProxy


class Endpoint:
    """Records its arguments; what it is called for comes from ``results``."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.results: list[FutureProxy[Any]] = []

    def broadcast(self, *arguments: Any) -> None:
        self.sent.append(arguments)

    def call_one(self) -> FutureProxy[Any]:
        return self.results.pop(0) if self.results else FutureProxy()


class Actor:
    def __init__(self) -> None:
        self.host, self.run, self.read, self.ack, self.write = (Endpoint() for _ in range(5))


def running(*batches: Any, capture: bool = False, labelled: bool = False) -> _Running:
    """A command whose host sends ``batches`` of events, to the end."""
    reader, writer = Actor(), Actor()
    writer.host.results = [FutureProxy.resolved("workers-1")]
    for number, batch in enumerate(batches):
        failed = isinstance(batch, Exception)
        reader.read.results.append(FutureProxy.failed(batch) if failed else FutureProxy.resolved((number, batch)))
    streams = HostStreams(1, reader, writer, queue.SimpleQueue())
    each = _Running(streams, capture=capture, labelled=labelled)
    each.start(["command"], {}, None, stdin=False)
    while not each.finished:
        each.arrived(streams.arrivals.get(timeout=30)[1])
    each.flush()
    return each


OUT = [(STDOUT, "data", b"a\nb", 0)]
EXIT = [(PROCESS, "exit", b"", 3)]


def test_output_is_printed_as_it_is(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    each = running(OUT, [(STDERR, "data", b"\xff", 0)], EXIT)
    assert capsysbinary.readouterr() == (b"a\nb", b"\xff")
    assert each.result() == CommandResult(1, "workers-1", 3)
    assert each.streams.writer.ack.sent == [(STDOUT, 3), (STDERR, 1)]  # the credit returns


def test_output_of_several_hosts_is_labelled_by_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    running(OUT, [(STDOUT, "data", b"c\nd", 0)], EXIT, labelled=True)
    assert capsys.readouterr().out.splitlines() == [f"[workers-1 rank 1] {line}" for line in ("a", "bc", "d")]


def test_captured_output_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    each = running(OUT, OUT, EXIT, capture=True)
    assert each.result().stdout == "a\nba\nb"
    assert capsys.readouterr().out == ""


def test_a_command_that_cannot_run_says_why_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    each = running([(PROCESS, "failed", b"cannot run x: No such file", 127)])
    assert (each.result().returncode, each.result().error) == (127, "cannot run x: No such file")
    assert capsys.readouterr().err == "meshgate: rank 1: cannot run x: No such file\n"


def test_a_lost_host_has_an_exit_code_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    each = running(OUT, GatewayLostError("the gateway is gone"))
    assert each.result().returncode == LOST
    assert "the gateway is gone" in capsys.readouterr().err


def test_a_host_that_is_known_to_be_lost_does_not_keep_the_command_from_the_others() -> None:
    class Lost(Actor):
        def broadcast(self, *arguments: Any) -> None:
            raise GatewayLostError("workers-1 is lost")

    reader, writer = Actor(), Lost()
    reader.read.results = [FutureProxy.failed(GatewayLostError("workers-1 is lost")) for _ in range(2)]
    writer.run = writer.write = writer  # type: ignore[assignment]
    each = _Running(HostStreams(1, reader, writer, queue.SimpleQueue()), capture=True, labelled=True)
    each.start(["command"], {}, None, stdin=True)
    each.send(b"input")
    each.arrived(each.streams.arrivals.get(timeout=30)[1])
    assert (each.result().returncode, each.result().error) == (LOST, "workers-1 is lost")


def test_output_goes_to_a_stream_without_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = io.StringIO()
    monkeypatch.setattr(sys, "stdout", notebook)
    running(OUT, EXIT)
    assert notebook.getvalue() == "a\nb"


def test_a_character_that_arrives_in_two_parts_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = io.StringIO()
    monkeypatch.setattr(sys, "stdout", notebook)
    first, second = "ü".encode()[:1], "ü".encode()[1:]
    running([(STDOUT, "data", b"a" + first, 0)], [(STDOUT, "data", second + b"b" + first, 0)], EXIT)
    assert notebook.getvalue() == "aüb\ufffd"


def test_a_line_without_end_is_printed_in_parts_of_whole_characters(capsys: pytest.CaptureFixture[str]) -> None:
    text = "x" + "€" * (MAX_LINE // 3 + 10)
    data = text.encode()
    pieces = [[(STDOUT, "data", data[at : at + 65536], 0)] for at in range(0, len(data), 65536)]
    each = running(*pieces, EXIT, labelled=True)
    first, second = (line.removeprefix("[workers-1 rank 1] ") for line in capsys.readouterr().out.splitlines())
    assert first + second == text
    assert MAX_LINE - 3 < len(first.encode()) <= MAX_LINE
    assert sum(count for _, count in each.streams.writer.ack.sent) == len(data)


def test_the_output_of_one_read_returns_its_credit_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    each = running([*OUT, (STDERR, "data", b"e", 0), *OUT], EXIT)
    assert each.streams.writer.ack.sent == [(STDOUT, 6), (STDERR, 1)]
    assert capsys.readouterr() == ("a\nba\nb", "e")


def test_the_highest_exit_code_is_that_of_all() -> None:
    executed = Executed({rank: CommandResult(rank, "h", code) for rank, code in enumerate((0, 7, 3))})
    assert executed.returncode == 7
    assert executed[2].returncode == 3
    assert [result.rank for result in executed] == [0, 1, 2]
    assert len(executed) == 3


@pytest.mark.parametrize("command", ["nvidia-smi", [], [1]])
def test_a_command_is_a_list_of_strings(command: Any) -> None:
    with pytest.raises(TypeError, match="list of strings"):
        execute([], command)  # type: ignore[arg-type]


@pytest.mark.parametrize("capture", [False, True])
def test_a_program_without_stdout_may_run_commands(monkeypatch: pytest.MonkeyPatch, capture: bool) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert running([(STDOUT, "data", b"a", 0)], EXIT, capture=capture).result().returncode == 3


class Response(io.BytesIO):
    """Has read more than it has returned: its descriptor is not ready, as that of a connection that stays open."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.pipe = os.pipe()

    def fileno(self) -> int:
        return self.pipe[0]


def test_what_a_response_has_read_ahead_is_sent() -> None:
    response = Response(b"body")
    with input_of(response) as (one, other, send):
        send()
        assert sent_to(one) == sent_to(other) == [b"body", b""]
    for end in response.pipe:
        os.close(end)


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_a_descriptor_of_the_input_may_have_any_number() -> None:
    reading, writing = os.pipe()
    high = fcntl.fcntl(reading, fcntl.F_DUPFD, 1030)  # select() takes those below 1,024
    os.close(reading)
    os.write(writing, b"data")
    os.close(writing)
    with open(high, "rb") as file, input_of(file) as (one, _, send):
        send()
        assert sent_to(one) == [b"data", b""]


@contextlib.contextmanager
def input_of(stdin: IO[bytes]) -> Iterator[tuple[_Running, _Running, Callable[[], None]]]:
    """Two commands with the same input, and what sends of it what there is room for."""
    arrivals: queue.SimpleQueue[Any] = queue.SimpleQueue()
    commands = []
    for rank in range(2):
        writer = Actor()
        writer.host.results = [FutureProxy.resolved("workers-1")]
        commands.append(_Running(HostStreams(rank, Actor(), writer, arrivals), capture=False, labelled=True))
        commands[-1].start(["command"], {}, None, stdin=True)
    entered = _Input(stdin, commands, arrivals)

    def send() -> None:
        entered.ask()
        while entered._reading:
            entered.arrived(arrivals.get(timeout=30)[1])
            entered.ask()

    yield commands[0], commands[1], send
    entered.close()


def sent_to(command: _Running) -> list[bytes]:
    return [data for _, data in command.streams.writer.write.sent]


def take(command: _Running, *events: tuple[int, str, bytes, int]) -> None:
    command.arrived(FutureProxy.resolved((command.streams._next, list(events))))


def test_the_slowest_command_sets_the_pace_of_the_input() -> None:
    data = os.urandom(WINDOW * 2)
    with input_of(io.BytesIO(data)) as (fast, slow, send):
        send()
        assert b"".join(sent_to(fast)) == data[:WINDOW]
        take(fast, (STDIN, "wrote", b"", WINDOW))
        send()
        assert b"".join(sent_to(fast)) == data[:WINDOW]
        take(slow, (STDIN, "wrote", b"", WINDOW))
        send()
        for each in (fast, slow):
            take(each, (STDIN, "wrote", b"", WINDOW))
        send()
        assert b"".join(sent_to(fast)) == b"".join(sent_to(slow)) == data
        assert sent_to(fast)[-1] == b""  # its end


@pytest.mark.parametrize("over", [(STDIN, "closed", b"", 0), (PROCESS, "exit", b"", 0)])
def test_a_command_that_takes_no_input_any_more_holds_nothing_up(over: tuple[int, str, bytes, int]) -> None:
    data = os.urandom(WINDOW * 2)
    with input_of(io.BytesIO(data)) as (gone, other, send):
        send()
        take(gone, over)
        take(other, (STDIN, "wrote", b"", WINDOW))
        send()
        assert (len(b"".join(sent_to(gone))), len(b"".join(sent_to(other)))) == (WINDOW, 2 * WINDOW)
        take(other, over)
        send()
        assert sent_to(other)[-1] != b""  # nothing is read for no command


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """A terminal: our end, and the one that programs use."""
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


class TypedEndpoint:
    def __init__(self) -> None:
        self.sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.results: list[FutureProxy[Any]] = []

    def broadcast(self, *arguments: Any) -> None:
        self.sent.put(arguments)

    def call_one(self) -> FutureProxy[Any]:
        return self.results.pop(0) if self.results else FutureProxy()


class TypedActor:
    def __init__(self) -> None:
        self.read, self.write, self.ack = TypedEndpoint(), TypedEndpoint(), TypedEndpoint()


def test_the_terminal_is_raw_meanwhile_and_as_before_afterwards(terminal: tuple[int, int]) -> None:
    _, theirs = terminal
    before = termios.tcgetattr(theirs)
    with _raw(theirs):
        assert not termios.tcgetattr(theirs)[3] & (termios.ICANON | termios.ECHO | termios.ISIG)
    assert termios.tcgetattr(theirs) == before


def test_keys_are_sent_as_they_are_typed(terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    actor = TypedActor()
    with _raw(theirs), _forwarding_input(theirs, actor):
        for keys in (b"l", b"s\r", b"\x03"):
            os.write(ours, keys)
            assert actor.write.sent.get(timeout=30) == (STDIN, keys)


def test_the_size_of_the_terminal_is_sent_when_it_changes(terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 132, 0, 0))
    assert _size(theirs) == (50, 132)
    sizes: list[tuple[int, int]] = []
    before = signal.getsignal(signal.SIGWINCH)
    with _on_resize(lambda: sizes.append(_size(theirs))):
        signal.raise_signal(signal.SIGWINCH)
    assert sizes == [(50, 132)]
    assert signal.getsignal(signal.SIGWINCH) == before
    with open(os.devnull) as file:
        assert _size(file.fileno()) == (24, 80)


def test_a_thread_that_gets_no_signals_has_no_handler() -> None:
    before = signal.getsignal(signal.SIGWINCH)
    seen = []

    def run() -> None:
        with _on_resize(lambda: None):
            seen.append(signal.getsignal(signal.SIGWINCH))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]


@pytest.mark.parametrize(("kind", "data", "code"), [("exit", b"", 3), ("failed", b"cannot run x", 127)])
def test_output_is_shown_until_the_command_ends(terminal: tuple[int, int], kind: str, data: bytes, code: int) -> None:
    ours, theirs = terminal
    actor = TypedActor()
    actor.read.results = [
        FutureProxy.resolved((0, [(STDIN, "data", b"50 %\r", 0)])),
        FutureProxy.resolved((1, [(STDIN, "end", b"", 0), (PROCESS, kind, data, code)])),
    ]
    host = HostStreams(0, actor, actor, queue.SimpleQueue())
    host.start()
    with _raw(theirs):
        assert _show_output(host, theirs) == code
    shown = b"50 %\r" + (data + b"\r\n" if data else b"")
    found = b""
    while len(found) < len(shown):
        found += os.read(ours, 100)
    assert found == shown
    assert actor.ack.sent.get(timeout=30) == (STDIN, 5)


def test_a_shell_needs_a_terminal_and_a_known_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="the mesh has ranks 0 to 0"):
        run_shell([None], 1)  # type: ignore[arg-type]
    with open(os.devnull) as file:
        monkeypatch.setattr(sys, "stdin", file)
        monkeypatch.setattr(sys, "stdout", file)
        with pytest.raises(ValueError, match="needs a terminal"):
            run_shell([None], 0)  # type: ignore[arg-type]
