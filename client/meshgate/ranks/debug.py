"""A debugger on the laptop for threads of a job that have stopped at ``breakpoint()``, and debugpy for an editor.

The commands are those of Monarch's debugger, ``help`` lists them. What the processes do meanwhile is in
``meshgate_gateway/engine/on_worker/breakpoints.py``.
"""

from __future__ import annotations

import codecs
import contextlib
import itertools
import json
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshgate.errors import JobError
from meshgate.ranks import HOSTS_TIMEOUT, answers, problem_lines, spawn_alone, why_unread
from meshgate.ranks.forward import ForwardedPort, forward
from meshgate.ranks.host_streams import HostStreams, spawn_streams
from meshgate.ranks.stacks_on_host import StackReader

if TYPE_CHECKING:
    from types import TracebackType

    from meshgate.proxies import HostMeshProxy


ATTACH, DETACH = "\x01attach ", "\x01detach\n"
PROMPT, RESUMED = "\x02", "\x03"
HELP = """\
list                                  list the ranks that have stopped
attach <actor> <rank>                 debug one of them with pdb; in it, detach returns here and leaves it stopped
cast <actor> ranks(...) <command>     send a pdb command to several: ranks(1), ranks(1,4), ranks(0:8:2), ranks(:)
continue                              clear all breakpoints, and let all of them continue
quit                                  end the debugger; what has stopped stays stopped
help                                  print this
"""
START_TIMEOUT = 60.0  # seconds; debugpy starts a process of its own


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """A thread that has stopped: ``rank`` is that of the actor ``actor``."""

    actor: str
    rank: int
    host: str
    file: str
    line: int
    function: str
    pid: int
    thread: int
    commands: int
    output: int
    host_rank: int


class Debugger:
    """``hosts`` are the streams of all hosts. Use one at a time for a job."""

    def __init__(self, hosts: Sequence[HostStreams]) -> None:
        self._hosts = {host.rank: host for host in hosts}
        self._numbers = itertools.count(1)
        self.problems: dict[str, str] = {}  # why hosts did not say what has stopped, by host
        for host in hosts:
            host.start()

    def stopped(self) -> list[Breakpoint]:
        """The threads that have stopped now, by actor and rank. ``problems`` then has the hosts that are left out."""
        hosts = {f"host {rank}": host for rank, host in self._hosts.items()}
        asked = {name: host.writer.breakpoints.call_one() for name, host in hosts.items()}
        found = []
        self.problems = {}
        for name, stopped in answers(asked, self.problems):
            for about in stopped:
                facts = {name: about[name] for name in Breakpoint.__slots__ if name != "host_rank"}
                found.append(Breakpoint(**facts, host_rank=hosts[name].rank))
        return sorted(found, key=lambda each: (each.actor, each.rank, each.thread))

    def find(self, actor: str, ranks: Callable[[int], bool]) -> list[Breakpoint]:
        return [each for each in self.stopped() if each.actor == actor and ranks(each.rank)]

    def send(self, stopped: Breakpoint, command: str) -> None:
        """Sends a pdb command without waiting for its output, which the next ``attach`` shows."""
        with self._dialogue(stopped) as dialogue:
            dialogue.write(f"{command}\n")

    def attach(self, stopped: Breakpoint, read: Callable[[], str], show: Callable[[str], object]) -> None:
        """Passes lines of ``read()`` to pdb and its output to ``show``, until ``detach`` or until the thread continues.

        An interrupt or the end of the input (EOFError) detaches.
        """
        with self._dialogue(stopped) as dialogue:
            dialogue.attach()
            try:
                if self._talk(dialogue, read, show):
                    show(f"\n{stopped.actor} rank {stopped.rank} continues\n")
                    return
            except (EOFError, KeyboardInterrupt):
                show("\n")
            dialogue.write(DETACH)
            show(f"detached from {stopped.actor} rank {stopped.rank}, which stays stopped\n")

    def _talk(self, dialogue: _Dialogue, read: Callable[[], str], show: Callable[[str], object]) -> bool:
        """Returns whether the thread has continued."""
        for text in dialogue.texts():
            show(text.rstrip(PROMPT + RESUMED))
            if text[-1] == RESUMED:
                return True
            if text[-1] == PROMPT:
                line = read()
                if line.strip() == "detach":
                    return False
                dialogue.write(f"{line}\n")
        return True  # the process has ended

    @contextlib.contextmanager
    def _dialogue(self, stopped: Breakpoint) -> Iterator[_Dialogue]:
        host, stream = self._hosts[stopped.host_rank], next(self._numbers)
        if not host.writer.open_dialogue.call_one(stream, stopped.pid, stopped.commands, stopped.output).get():
            raise JobError(f"{stopped.actor} rank {stopped.rank} has ended")
        dialogue = _Dialogue(host, stream)
        try:
            yield dialogue
            dialogue.wait_written()
        finally:
            host.writer.close_stream.broadcast(stream)


class _Dialogue:
    """The stream to and from the debugger of one thread."""

    def __init__(self, host: HostStreams, stream: int) -> None:
        self._host, self._stream = host, stream
        self._unwritten = 0  # bytes that have not reached the process
        self._ended = False
        self._received: deque[str] = deque()
        self._undelivered = self._greeting = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, text: str) -> None:
        data = text.encode(errors="replace")
        self._unwritten += len(data)
        self._host.writer.write.broadcast(self._stream, data)

    def attach(self) -> None:
        """Asks for what pdb prints. What an earlier client did not read, which comes before the answer, is dropped."""
        self._greeting = f"{ATTACH}{secrets.token_hex(8)}\n"
        self.write(self._greeting)

    def wait_written(self) -> None:
        """Until what was sent has reached the process: closing the stream would drop it."""
        while self._unwritten > 0 and not self._ended:
            self._wait()

    def texts(self) -> Iterator[str]:
        """What pdb prints, split after each marker, until the process ends."""
        while self._received or not self._ended:
            if self._received:
                yield self._received.popleft()
            else:
                self._wait()

    def _wait(self) -> None:
        host, future = self._host.arrivals.get()
        for event in host.take(future):
            if (host, event.stream) != (self._host, self._stream):
                continue
            if event.kind == "end":
                self._ended = True
            elif event.kind == "wrote":
                self._unwritten -= event.number
            elif event.kind == "data":
                host.writer.ack.broadcast(event.stream, len(event.data))
                self._undelivered += self._decoder.decode(event.data)
                start = self._undelivered.find(self._greeting)
                if start >= 0:
                    text = self._undelivered[start + len(self._greeting) :]
                    self._received += filter(None, _AFTER_MARKER.split(text))
                    self._undelivered = self._greeting = ""


_AFTER_MARKER = re.compile(f"(?<=[{PROMPT}{RESUMED}])")


def parse_ranks(text: str) -> Callable[[int], bool]:
    """What ``ranks(...)`` selects: a rank, a list of ranks, or a range. Raises ValueError."""
    match = re.fullmatch(r"ranks\(\s*(.*?)\s*\)", text)
    if match and re.fullmatch(r"\d+(\s*,\s*\d+)*", match[1]):
        chosen = {int(rank) for rank in match[1].split(",")}
        return lambda rank: rank in chosen
    if match and (bounds := re.fullmatch(r"(\d*)\s*:\s*(\d*)(?:\s*:\s*(\d+))?", match[1])):
        start, step = int(bounds[1] or 0), int(bounds[3] or 1)
        stop = int(bounds[2]) if bounds[2] else None
        return lambda rank: rank >= start and (stop is None or rank < stop) and (rank - start) % max(step, 1) == 0
    raise ValueError(f"cannot read {text!r}: expected ranks(1), ranks(1,4), ranks(0:8:2) or ranks(:)")


def run_console(debugger: Debugger, read: Callable[[str], str], show: Callable[[str], object]) -> None:
    """Runs the commands that ``read(prompt)`` returns, until ``quit`` or the end of the input (EOFError)."""
    show("Enter 'help' for a list of commands, 'list' for what has stopped.\n")
    while True:
        try:
            line = read("meshgate_dbg> ").strip()
            if line in ("quit", "q"):
                return
            if line:
                _run_command(debugger, line, read, show)
        except EOFError:
            return
        except (ValueError, JobError) as error:
            show(f"{error}\n")


def _run_command(debugger: Debugger, line: str, read: Callable[[str], str], show: Callable[[str], object]) -> None:
    if line in ("help", "h"):
        show(HELP)
    elif line in ("list", "l"):
        show(_table(debugger.stopped()) + "".join(f"{line}\n" for line in problem_lines(debugger.problems)))
    elif line in ("continue", "c"):
        stopped = debugger.stopped()
        for each in stopped:
            debugger.send(each, "clear")
            debugger.send(each, "continue")
        show(f"{len(stopped)} continue\n")
    elif match := re.fullmatch(r"(?:attach|a)\s+(\S+)\s+(\d+)", line):
        rank = int(match[2])
        (found, *_) = _require(debugger.find(match[1], lambda each: each == rank), line)
        debugger.attach(found, lambda: read(""), show)
    elif match := re.fullmatch(r"cast\s+(\S+)\s+(ranks\(.*?\))\s+(\S.*)", line):
        found_all = _require(debugger.find(match[1], parse_ranks(match[2])), line)
        for each in found_all:
            debugger.send(each, match[3])
        show(f"sent to {len(found_all)}\n")
    else:
        raise ValueError(f"unknown command {line!r}; 'help' lists the commands")


def _require(found: list[Breakpoint], line: str) -> list[Breakpoint]:
    if not found:
        raise ValueError(f"{line!r}: no such actor and rank has stopped; 'list' shows those that have")
    return found


def _table(stopped: Sequence[Breakpoint]) -> str:
    if not stopped:
        return "nothing has stopped at a breakpoint\n"
    rows = [("ACTOR", "RANK", "HOST", "FUNCTION", "LINE")]
    rows += [(each.actor, str(each.rank), each.host, each.function, f"{each.file}:{each.line}") for each in stopped]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "".join(f"{line.rstrip()}\n" for line in lines)


@contextlib.contextmanager
def debugging(hosts: HostMeshProxy) -> Iterator[Debugger]:
    """A debugger for all hosts of a mesh."""
    with contextlib.ExitStack() as stack:
        yield Debugger(list(spawn_streams(hosts, range(len(hosts)), "meshgate_debug", stack).values()))


@dataclass(frozen=True, slots=True)
class EditorDebugging:
    """An editor may attach to ``port`` of 127.0.0.1 until this is closed. ``configuration`` is for VS Code."""

    port: int
    roots: tuple[str, ...]
    forwarded: ForwardedPort

    @property
    def configuration(self) -> dict[str, Any]:
        """An entry for ``launch.json``: synced code maps to the files of the workspace."""
        return {
            "name": "meshgate",
            "type": "debugpy",
            "request": "attach",
            "connect": {"host": "127.0.0.1", "port": self.port},
            "pathMappings": [{"localRoot": "${workspaceFolder}", "remoteRoot": root} for root in self.roots],
            "justMyCode": True,
        }

    def close(self) -> None:
        """Ends the connection. The process runs on; debugpy stays in it."""
        self.forwarded.close()

    def __enter__(self) -> EditorDebugging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __str__(self) -> str:
        return json.dumps(self.configuration, indent=2)


def debug_in_editor(hosts: HostMeshProxy, procs: str, rank: int) -> EditorDebugging:
    """Starts debugpy in process ``rank`` of the proc mesh named ``procs``. Raises JobError that says why it cannot."""
    with contextlib.ExitStack() as stack:
        asked = []
        for host in range(len(hosts)):
            spawned = spawn_alone(hosts, host, "meshgate_stacks")
            stack.callback(spawned.stop)
            reader: Any = spawned.spawn("meshgate_stacks", StackReader)
            asked.append(reader.start_debugpy.call_one(procs, rank, START_TIMEOUT))
        deadline = time.monotonic() + START_TIMEOUT + HOSTS_TIMEOUT
        errors = [future.exception(max(0.0, deadline - time.monotonic())) for future in asked]
        replies = [future.get() if error is None else None for future, error in zip(asked, errors, strict=True)]
    found = next(((host, answer) for host, answer in enumerate(replies) if answer), None)
    if found is None:
        for error in filter(None, errors):  # its host may have the process
            if isinstance(error, TimeoutError):
                raise JobError(f"cannot look for rank {rank} of {procs!r}: a host {why_unread(error)}") from error
            raise error
        raise JobError(f"no process has rank {rank} in a proc mesh named {procs!r}; job.status() lists the meshes")
    host, answer = found
    if "problem" in answer:
        raise JobError(f"cannot debug rank {rank} of {procs!r}: {answer['problem']}")
    forwarded = forward(hosts, answer["port"], host, local_port=None, reverse=False)
    return EditorDebugging(forwarded.port, tuple(answer["roots"]), forwarded)
