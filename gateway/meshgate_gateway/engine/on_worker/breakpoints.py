"""``breakpoint()`` in a worker process: stops there until a debugger is attached from the laptop. Delivered by value.

Monarch's own hook waits for a debugger that listens next to the driver, so through a gateway it would wait in silence.
Here an anonymous file (memfd) named ``meshgate-debug`` marks each thread that has stopped, and says where, and pipes
carry the dialogue. Only processes of the same user can open them, through ``/proc``. Without ``/proc`` (macOS),
Monarch's hook stays.

The dialogue: lines to pdb in one direction, its output in the other. A line that begins with ``ATTACH`` is repeated,
followed by the output since the last command, and until ``DETACH`` output is written as it comes; ``PROMPT`` follows
each prompt, and ``RESUMED`` says that the program runs on. These lines are read when pdb wants a command. This process
has only the writing end of the output's pipe, which clients open for reading: once the last has left, however it did,
nothing waits for a reader any more. What a client has left unread reaches the next one, which drops all before its own
line.
"""

from __future__ import annotations

import json
import os
import pdb
import signal
import sys
import threading
from typing import Any

NAME = "meshgate-debug"
ATTACH, DETACH = "\x01attach ", "\x01detach\n"
PROMPT, RESUMED = "\x02", "\x03"
MAX_RECENT = 1 << 20  # characters of output that are repeated
ANNOUNCE_INTERVAL = 60.0  # seconds


class Dialogue:
    """What pdb uses as its input and its output."""

    def __init__(self) -> None:
        commands, self.commands = os.pipe()
        reading, self.output = os.pipe()
        os.close(reading)
        self._input = os.fdopen(commands, encoding="utf-8", errors="replace")
        self.attached = False
        self._recent, self._dropped = "", 0  # characters of earlier output that are not in ``_recent``

    def write(self, text: str) -> int:
        recent = self._recent + text
        self._recent = recent[-MAX_RECENT:]
        self._dropped += len(recent) - len(self._recent)
        self._send(text)
        return len(text)

    def flush(self) -> None:
        pass

    def readline(self) -> str:
        self._send(PROMPT)
        while True:
            line = self._input.readline()
            if line.startswith(ATTACH):
                self.attached = True
                note = f"({self._dropped} earlier characters are not shown)\n" if self._dropped else ""
                self._send(line + note + self._recent + PROMPT)
            elif line == DETACH:
                self.attached = False
            else:
                self._recent, self._dropped = "", 0
                return line

    def resumed(self) -> None:
        self._send(RESUMED)
        self.attached = False
        self._recent, self._dropped = "", 0

    def _send(self, text: str) -> None:
        if not self.attached:
            return
        data = text.encode(errors="replace")
        # A program may have set SIGPIPE back to ending the process.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPIPE])
        try:
            while data:
                data = data[os.write(self.output, data) :]
        except BrokenPipeError:  # the client has left
            self.attached = False
            signal.sigtimedwait([signal.SIGPIPE], 0)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class RemotePdb(pdb.Pdb):
    """One thread's debugger. ``about`` describes its process."""

    def __init__(self, about: dict[str, Any]) -> None:
        self.dialogue = Dialogue()
        super().__init__(stdin=self.dialogue, stdout=self.dialogue, nosigint=True, readrc=False)  # type: ignore[arg-type]
        self.use_rawinput = False
        pipes = {"commands": self.dialogue.commands, "output": self.dialogue.output}
        self.about = {**about, **pipes, "pid": os.getpid(), "thread": threading.get_ident()}
        self.mark = os.memfd_create(NAME)
        self.over = threading.Event()

    def interaction(self, frame: Any, *arguments: Any) -> None:
        code = frame.f_code
        where = {"file": code.co_filename, "line": frame.f_lineno, "function": code.co_name}
        self.show({**self.about, **where, "waiting": True})
        self.over = over = threading.Event()
        threading.Thread(target=self.announce, args=(over, where), daemon=True).start()
        try:
            super().interaction(frame, *arguments)
        finally:
            over.set()
            self.show({**self.about, "waiting": False})

    def announce(self, over: threading.Event, where: dict[str, Any]) -> None:
        """Says that the process waits, at once and every minute, unless a debugger is attached."""
        actor = f"{self.about['actor']} rank {self.about['rank']}"
        place = f"{where['file']}:{where['line']} in {where['function']}"
        while True:
            if not self.dialogue.attached:
                message = f"{actor} has stopped at {place}; `meshgate debug` attaches a debugger"
                print(message, file=sys.stderr, flush=True)  # noqa: T201
            if over.wait(ANNOUNCE_INTERVAL):
                return

    def show(self, state: dict[str, Any]) -> None:
        data = json.dumps(state).encode() + b"\n"
        os.ftruncate(self.mark, 0)
        os.pwrite(self.mark, data, 0)

    def set_continue(self) -> None:
        super().set_continue()
        self.dialogue.resumed()

    def set_quit(self) -> None:
        super().set_quit()
        self.dialogue.resumed()

    def do_clear(self, arg: str) -> Any:
        """Without arguments clears all breakpoints, and does not ask."""
        if arg:
            return super().do_clear(arg)
        self.clear_all_breaks()
        return None

    do_cl = do_clear

    def emptyline(self) -> bool:
        """Does not repeat the last command."""
        return False


def install_breakpoints(mesh: str, rank: int, host: str) -> None:
    """Makes ``breakpoint()`` in this process wait for a debugger of the laptop."""
    if not hasattr(os, "memfd_create"):
        return
    threads = threading.local()

    def stop(*args: Any, **kwargs: Any) -> None:
        debugger = getattr(threads, "debugger", None)
        if debugger is None:
            about = {"mesh": mesh, "process": rank, "host": host, "actor": mesh, "rank": rank}
            debugger = threads.debugger = RemotePdb({**about, **current_actor(sys._getframe(1))})
        debugger.set_trace(sys._getframe(1))

    sys.breakpointhook = stop


def current_actor(frame: Any) -> dict[str, Any]:
    """The name and the rank of the actor that runs ``frame``; empty outside of one, where Monarch starts a client."""
    while frame is not None and "/monarch/" not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return {}
    from monarch.actor import context  # noqa: PLC0415 - resolved on the worker

    instance = context().actor_instance
    return {"actor": str(instance.name), "rank": int(instance.rank.rank)}
