"""The debugger on the laptop, with real processes that stop. Real actors are in tests/end_to_end/test_ranks.py."""

from __future__ import annotations

import json
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from meshgate.errors import JobError
from meshgate.ranks import debug, on_host
from meshgate.ranks.debug import DETACH, Debugger, debug_in_editor, parse_ranks, run_console
from meshgate.ranks.host_streams import HostStreams
from meshgate.ranks.on_host import StreamReader, StreamWriter
from meshgate.ranks.streams import Hub
from meshgate.session.futures import FutureProxy
from tests.programs import child_process
from tests.waiting import wait_for

needs_proc = pytest.mark.skipif(not Path("/proc").is_dir(), reason="debuggers are reached through /proc")
DEADLINE = 60.0
PROGRAM = """
import signal, sys
signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as some programs do; a client that has left may not end them
from meshgate_gateway.engine.on_worker.breakpoints import install_breakpoints
install_breakpoints("procs", int(sys.argv[1]), "workers-0")
def step(x):
    breakpoint()
    y = x * 2
    return y
print(step(4), flush=True)
print(step(5), flush=True)
"""


class Endpoint:
    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run
        self.broadcast = run

    def call_one(self, *arguments: Any) -> FutureProxy[Any]:
        return FutureProxy.resolved(self._run(*arguments))


class Host:
    """The actors of ``on_host``, in this process; reads are answered by a thread."""

    def __init__(self) -> None:
        reader, writer = StreamReader(), StreamWriter()
        self.read = self
        self._reader = reader
        self._requests: queue.SimpleQueue[FutureProxy[Any] | None] = queue.SimpleQueue()
        for name in ("breakpoints", "open_dialogue", "write", "ack", "close_stream"):
            method = getattr(StreamWriter, name)._method
            setattr(self, name, Endpoint(lambda *arguments, method=method: method(writer, *arguments)))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def call_one(self) -> FutureProxy[Any]:
        future: FutureProxy[Any] = FutureProxy()
        self._requests.put(future)
        return future

    def _serve(self) -> None:
        while (future := self._requests.get()) is not None:
            answer = StreamReader.read._method(self._reader)
            future.settle(lambda answer=answer: answer)

    def stop(self) -> None:
        self._requests.put(None)
        on_host._hub.close()
        self._thread.join()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that stop at a breakpoint, ranks 0 and 1."""
    (tmp_path / "program.py").write_text(PROGRAM)
    with ExitStack() as stack:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        commands = ([sys.executable, tmp_path / "program.py", str(rank)] for rank in range(2))
        yield [stack.enter_context(child_process(command, **pipes)) for command in commands]


@pytest.fixture
def debugger(processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch) -> Iterator[Debugger]:
    """A debugger, once both have stopped."""
    monkeypatch.setattr(on_host, "_hub", Hub())
    monkeypatch.setattr(on_host, "siblings", lambda: [child.pid for child in processes])
    host: Any = Host()
    debugger = Debugger([HostStreams(0, host, host, queue.SimpleQueue())])
    wait_stopped(debugger, 2)
    yield debugger
    host.stop()


def wait_stopped(debugger: Debugger, count: int) -> None:
    wait_for(lambda: len(debugger.stopped()) == count, f"{count} stopped processes", timeout=DEADLINE)


def console(debugger: Any, *lines: str) -> str:
    """What a terminal shows for these lines."""
    shown: list[str] = []
    typed = iter(lines)

    def read(prompt: str) -> str:
        line = next(typed, None)
        if line is None:
            raise EOFError
        shown.append(f"{prompt}{line}\n")
        return line

    run_console(debugger, read, shown.append)
    return "".join(shown)


@needs_proc
def test_a_rank_is_debugged_left_and_continued(debugger: Debugger, processes: list[subprocess.Popen[bytes]]) -> None:
    text = console(debugger, "list", "attach procs 1", "p x", "n", "p y", "detach", "attach procs 1", "p y + 1", "c")
    assert "procs  0     workers-0  step" in text
    assert "procs  1     workers-0  step" in text
    assert "-> y = x * 2\n(Pdb) p x\n4\n(Pdb) n\n" in text
    assert "(Pdb) p y\n8\n(Pdb) detach\ndetached from procs rank 1, which stays stopped\n" in text
    assert "attach procs 1\n8\n(Pdb) p y + 1\n9\n(Pdb) c\n" in text
    assert "procs rank 1 continues" in text
    assert processes[1].stdout is not None
    assert processes[1].stdout.readline() == b"8\n"
    wait_stopped(debugger, 2)  # at the next breakpoint


@needs_proc
def test_commands_are_sent_to_several_and_all_continue(
    debugger: Debugger, processes: list[subprocess.Popen[bytes]]
) -> None:
    assert "sent to 2\n" in console(debugger, "cast procs ranks(:) x = 100")
    assert "2 continue\n" in console(debugger, "continue")
    for child in processes:
        assert child.stdout is not None
        assert child.stdout.readline() == b"200\n"


@needs_proc
def test_the_end_of_the_input_detaches(debugger: Debugger) -> None:
    text = console(debugger, "attach procs 0")
    assert "detached from procs rank 0, which stays stopped" in text
    assert len(debugger.stopped()) == 2


@needs_proc
def test_output_for_a_client_that_left_while_the_rank_ran_is_shown_once(debugger: Debugger, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with debugger._dialogue(debugger.stopped()[0]) as left:
        left.attach()
        left.write(f"print(open({str(gate)!r}).read())\n")
        left.write(DETACH)  # as an interrupt does
    gate.write_text("late")
    text = console(debugger, "attach procs 0", "p x", "p x + 1", "detach")
    assert "attach procs 0\nlate\n(Pdb) p x\n4\n(Pdb) p x + 1\n5\n(Pdb) detach\n" in text


@needs_proc
def test_a_rank_that_prints_for_a_client_that_left_does_not_wait(debugger: Debugger, tmp_path: Path) -> None:
    gate, done = tmp_path / "gate", tmp_path / "done"
    os.mkfifo(gate)
    with debugger._dialogue(debugger.stopped()[0]) as left:
        left.attach()
        print_much = f"print(open({str(gate)!r}).read() * 200_000)"  # more than a pipe holds
        left.write(f"{print_much}; open({str(done)!r}, 'w').close()\n")
    gate.write_text("x")
    wait_for(done.exists, "the end of the command", timeout=DEADLINE)
    text = console(debugger, "attach procs 0", "detach")
    assert f"attach procs 0\n{'x' * 200_000}\n(Pdb) detach\n" in text


@needs_proc
def test_a_process_announces_that_it_waits(debugger: Debugger, processes: list[subprocess.Popen[bytes]]) -> None:
    assert processes[1].stderr is not None
    line = processes[1].stderr.readline().decode()
    assert re.match(r"procs rank 1 has stopped at .*program\.py:\d+ in step; `meshgate debug`", line)


@needs_proc
def test_a_process_that_has_ended_is_not_attached_to(
    debugger: Debugger, processes: list[subprocess.Popen[bytes]]
) -> None:
    stopped = debugger.stopped()[0]
    processes[0].kill()
    processes[0].wait()
    with pytest.raises(JobError, match="procs rank 0 has ended"):
        debugger.send(stopped, "p x")
    assert [each.rank for each in debugger.stopped()] == [1]


class Nothing:
    def __init__(self) -> None:
        self.problems = {"host 0": "it is lost", "host 2": "it is lost"}

    def stopped(self) -> list[Any]:
        return []

    def find(self, actor: str, ranks: Callable[[int], bool]) -> list[Any]:
        return []


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("help", "attach <actor> <rank>"),
        ("l", "nothing has stopped at a breakpoint\nhost 0, host 2: it is lost\n"),
        ("attach procs 3", "'attach procs 3': no such actor and rank has stopped"),
        ("cast procs ranks(x) p x", "cannot read 'ranks(x)': expected ranks(1)"),
        ("cast procs ranks(1) p x", "no such actor and rank has stopped"),
        ("nonsense", "unknown command 'nonsense'; 'help' lists the commands"),
        ("", ""),
        ("c", "0 continue"),
    ],
)
def test_what_the_console_answers_when_nothing_has_stopped(line: str, text: str) -> None:
    assert text in console(Nothing(), line, "quit", "never read")


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("ranks(1)", [1]),
        ("ranks(1, 4,6)", [1, 4, 6]),
        ("ranks(2:5)", [2, 3, 4]),
        ("ranks(:6:2)", [0, 2, 4]),
        ("ranks(:)", list(range(8))),
        ("ranks(6:)", [6, 7]),
    ],
)
def test_ranks_are_chosen_as_in_monarchs_debugger(text: str, ranks: list[int]) -> None:
    assert [rank for rank in range(8) if parse_ranks(text)(rank)] == ranks


class Hosts:
    """Each is asked by itself, and answers, or fails if its answer is an error."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.stopped, self.asked = answers, 0, 0
        self.start_debugpy = self

    def __len__(self) -> int:
        return len(self.answers)

    def slice(self, hosts: slice) -> Hosts:
        self.asked = hosts.start
        return self

    def spawn_procs(self, name: str) -> Hosts:
        return self

    def spawn(self, name: str, Class: type) -> Hosts:
        return self

    def call_one(self, *arguments: Any) -> FutureProxy[Any]:
        answer = self.answers[self.asked]
        return FutureProxy.failed(answer) if isinstance(answer, Exception) else FutureProxy.resolved(answer)

    def stop(self) -> None:
        self.stopped += 1


class Forwarded:
    port, closed = 4711, False

    def close(self) -> None:
        self.closed = True


def test_the_port_of_the_host_that_has_the_process_is_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    forwarded = Forwarded()
    monkeypatch.setattr(debug, "forward", lambda hosts, *arguments, **options: (asked.append(arguments), forwarded)[1])
    hosts: Any = Hosts(JobError("lost"), {"port": 5678, "roots": ["/store/v1"]})
    with debug_in_editor(hosts, "procs", 3) as debugging:
        assert asked == [(5678, 1)]
        assert debugging.port == 4711
        configuration = json.loads(str(debugging))
        assert configuration["connect"] == {"host": "127.0.0.1", "port": 4711}
        assert configuration["pathMappings"] == [{"localRoot": "${workspaceFolder}", "remoteRoot": "/store/v1"}]
    assert forwarded.closed
    assert hosts.stopped == 2


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        (({}, {}), "no process has rank 3 in a proc mesh named 'procs'"),
        (({}, JobError("host 1 is lost"), {}), "host 1 is lost"),
        (({}, TimeoutError("no result")), "cannot look for rank 3 of 'procs': a host did not answer in time"),
        (({"problem": "debugpy is not installed there"},), "cannot debug rank 3 of 'procs': debugpy is not installed"),
    ],
)
def test_a_process_that_cannot_be_debugged_is_an_error(answers: tuple[Any, ...], text: str) -> None:
    hosts: Any = Hosts(*answers)
    with pytest.raises(JobError, match=text):
        debug_in_editor(hosts, "procs", 3)
    assert hosts.stopped == len(answers)
