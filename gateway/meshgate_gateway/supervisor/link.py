"""The server's link to its supervisor: starts processes that outlive this server, and keeps what the next one needs.

Requests take effect in order, also those that the supervisor reads only after this server has died.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from meshgate_gateway.logs import EventLog
from meshgate_gateway.supervisor.supervisor import (
    Child,
    Inheritance,
    KeptDescriptors,
    Note,
    receive_message,
    send_message,
)

log = EventLog()

REQUEST_TIMEOUT = 30.0


class SupervisedProcess:
    """A child of the supervisor, as a ``child_process.Process``. ``kept``: the descriptors that are kept with it."""

    def __init__(
        self, link: SupervisorLink, key: str, note: Note, pid: int, output: int, status: int, exit_code: int | None
    ) -> None:
        self.key, self.note, self.pid, self.output = key, note, pid, output
        self.kept: list[int] = []
        self._link, self._status, self._exit_code = link, status, exit_code

    def on_exit(self, callback: Callable[[int], None]) -> None:
        """Calls ``callback`` with the exit code, once, on the running loop."""
        loop = asyncio.get_running_loop()

        def on_status() -> None:
            code = os.read(self._status, 16)
            loop.remove_reader(self._status)
            os.close(self._status)
            if code:  # else the supervisor has ended, and so does this server
                callback(int(code))

        if self._exit_code is not None:
            os.close(self._status)
            loop.call_soon(callback, self._exit_code)
        else:
            loop.add_reader(self._status, on_status)

    def send_signal(self, signum: signal.Signals) -> None:
        self._link.request("signal", self.key, signal=int(signum))

    def annotate(self, note: Note) -> None:
        """Replaces what the next server learns about this process."""
        self.note = note
        self._link.request("annotate", self.key, note=note)

    def release(self) -> None:
        """Closes the supervisor's copies of the descriptors that are kept with the process."""
        self._link.request("release", self.key)

    def forget(self) -> None:
        """The next server does not learn about this process, and the supervisor kills it if this server dies."""
        self._link.request("forget", self.key)


class SupervisorLink:
    """One per server. ``children`` and ``kept`` are what the last server left, and ``predecessor`` how it ended."""

    def __init__(self, inheritance: Inheritance) -> None:
        self.predecessor = inheritance.predecessor
        self.supervisor_pid = inheritance.supervisor_pid
        self.kept: Mapping[str, KeptDescriptors] = inheritance.kept
        self.children = {key: self._inherited(key, child) for key, child in inheritance.children.items()}
        self._socket = inheritance.link
        self._socket.settimeout(REQUEST_TIMEOUT)

    def watch(self) -> None:
        """Ends this process at once if the supervisor ends: what it holds is then closed, and this server too."""
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._on_readable)

    def serving(self) -> None:
        """This server serves: if it dies, another is to take its place."""
        self.request("serving")

    def start(
        self,
        key: str,
        note: Note,
        command: Sequence[str],
        environment: Mapping[str, str],
        descriptors: Sequence[int] = (),
        kept: Sequence[int] = (),
    ) -> SupervisedProcess:
        """Starts a process that outlives this server.

        It inherits ``descriptors``, whose numbers replace the arguments ``fd:0``, ``fd:1`` and so on. The supervisor
        keeps ``kept`` open while the process is known to it. Raises OSError.
        """
        request = {"command": list(command), "environment": dict(environment), "passed": len(descriptors)}
        self.request("start", key, [*descriptors, *kept], note=note, **request)
        try:
            answer = receive_message(self._socket)
        except TimeoutError:
            answer = None
        if answer is None:
            self._lost()
        reply, received = answer
        if error := reply.get("error"):
            raise OSError(*error)
        output, status = received
        return SupervisedProcess(self, key, note, reply["pid"], output, status, None)

    def keep(self, key: str, note: Note, descriptors: Sequence[int] = ()) -> None:
        """Keeps ``note`` and copies of ``descriptors`` for the next server; replaces what was kept under ``key``."""
        self.request("keep", key, descriptors, note=note)

    def drop(self, key: str) -> None:
        self.request("drop", key)

    def request(self, kind: str, key: str = "", descriptors: Sequence[int] = (), **facts: object) -> None:
        try:
            send_message(self._socket, {"type": kind, "key": key, **facts}, descriptors)
        except OSError:
            self._lost()

    def _inherited(self, key: str, child: Child) -> SupervisedProcess:
        process = SupervisedProcess(self, key, child.note, child.pid, child.output, child.status, child.exit_code)
        process.kept = child.kept
        return process

    def _on_readable(self) -> None:
        if not self._socket.recv(1, socket.MSG_PEEK):
            self._lost()

    def _lost(self) -> NoReturn:
        log.error("the supervisor has ended, and so does this server", supervisor=self.supervisor_pid)
        os._exit(1)
