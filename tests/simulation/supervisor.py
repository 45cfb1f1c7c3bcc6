"""Stands for the gateway's supervisor: starts servers and engines as simulated processes, and keeps what they share.

A server that dies is replaced. Engines live on, with the channels and notes that the supervisor keeps for them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshgate_gateway import gateway
from meshgate_gateway.engine import __main__ as engine_program
from meshgate_gateway.settings import Settings
from meshgate_gateway.supervisor.link import SupervisedProcess, SupervisorLink
from meshgate_gateway.supervisor.supervisor import KeptDescriptors, Note
from tests.simulation.processes import Process, World

FIRST_PID = 1 << 30  # of no real process
RESTART_SECONDS = 0.05


@dataclass
class _Child:
    key: str
    note: Note
    pid: int
    process: Process
    output: int
    status: int
    status_writer: int
    kept: list[int]
    exit_code: int | None = None


@dataclass
class Supervisor:
    """Runs one server at a time with ``settings``. ``address`` is the unix socket that it listens on."""

    world: World
    settings: Settings
    address: str = ""
    server: Process | None = None
    servers: int = 0
    restart: bool = True
    _listener: socket.socket = field(init=False)
    _children: dict[str, _Child] = field(default_factory=dict)
    _forgotten: list[Process] = field(default_factory=list)
    _kept: dict[str, KeptDescriptors] = field(default_factory=dict)
    _pids: int = FIRST_PID

    def __post_init__(self) -> None:
        self.address = os.path.join(tempfile.gettempdir(), "gateway")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen(64)

    @property
    def engines(self) -> list[Process]:
        return [child.process for child in self._children.values() if child.process.alive]

    def start_server(self) -> None:
        self.servers += 1
        predecessor = None if self.servers == 1 else "was killed by SIGKILL"
        server = self.server = Process(self.world, f"server {self.servers}", self._server_ended)
        with server._current():
            listener = socket.socket(fileno=os.dup(self._listener.fileno()))
            listener.setblocking(False)
            link = _Link(self, predecessor)
            server.start(gateway.serve(self.settings, listener, gateway.Commands(("engine",), ("reaper",)), link))

    def _server_ended(self, code: int) -> None:
        self.server = None
        for forgotten in self._forgotten:
            forgotten.kill()
        self._forgotten.clear()
        if self.restart:
            self.world.call_later(RESTART_SECONDS, self.start_server)

    def close(self) -> None:
        self._listener.close()
        for child in self._children.values():
            self._close_child(child)

    # --- what a server asks for

    def start(self, key: str, note: Note, descriptors: Sequence[int], kept: Sequence[int]) -> _Child:
        output, output_writer = os.pipe()
        status, status_writer = os.pipe()
        self._pids += 1
        pid = self._pids
        process = Process(self.world, f"engine {pid - FIRST_PID}", lambda code: self._exited(key, code))
        process.own(output_writer)
        child = _Child(key, note, pid, process, output, status, status_writer, [os.dup(each) for each in kept])
        self._children[key] = child
        with process._current():
            process.start(engine_program.serve(os.dup(descriptors[0]), None, None))
        return child

    def _exited(self, key: str, code: int) -> None:
        child = self._children.get(key)
        if child is not None:
            child.exit_code = code
            os.write(child.status_writer, str(code).encode())
            os.close(child.status_writer)

    def request(self, kind: str, key: str, descriptors: Sequence[int], facts: Mapping[str, object]) -> None:
        child = self._children.get(key)
        if kind in ("keep", "drop"):
            self._drop(key)
            if kind == "keep":
                self._kept[key] = KeptDescriptors(dict(facts["note"]), [os.dup(each) for each in descriptors])  # type: ignore[call-overload]
        elif child is None:
            return
        elif kind == "annotate":
            child.note = dict(facts["note"])  # type: ignore[call-overload]
        elif kind == "release":
            _close(child.kept)
        elif kind == "signal":
            self.world.call_later(0, child.process.kill)
        elif kind == "forget":
            del self._children[key]
            self._close_child(child)
            if child.process.alive:
                self._forgotten.append(child.process)

    def _drop(self, key: str) -> None:
        if (kept := self._kept.pop(key, None)) is not None:
            _close(kept.descriptors)

    def _close_child(self, child: _Child) -> None:
        _close([child.output, child.status])
        _close(child.kept)
        if child.exit_code is None:
            os.close(child.status_writer)

    def inheritance(self, link: SupervisorLink) -> tuple[dict[str, SupervisedProcess], dict[str, KeptDescriptors]]:
        """What a new server starts with."""
        children = {}
        for key, child in self._children.items():
            output, status = os.dup(child.output), os.dup(child.status)
            process = SupervisedProcess(link, key, child.note, child.pid, output, status, child.exit_code)
            process.kept = [os.dup(each) for each in child.kept]
            children[key] = process
        return children, {
            key: KeptDescriptors(kept.note, [os.dup(d) for d in kept.descriptors]) for key, kept in self._kept.items()
        }


class _Link(SupervisorLink):
    """A server's link to the simulated supervisor, without a socket."""

    def __init__(self, supervisor: Supervisor, predecessor: str | None) -> None:
        self._supervisor = supervisor
        self.predecessor, self.supervisor_pid = predecessor, FIRST_PID
        self.children, self.kept = supervisor.inheritance(self)

    def watch(self) -> None:
        """The simulated supervisor does not end."""

    def start(
        self,
        key: str,
        note: Note,
        command: Sequence[str],
        environment: Mapping[str, str],
        descriptors: Sequence[int] = (),
        kept: Sequence[int] = (),
    ) -> SupervisedProcess:
        child = self._supervisor.start(key, note, descriptors, kept)
        return SupervisedProcess(self, key, note, child.pid, os.dup(child.output), os.dup(child.status), None)

    def request(self, kind: str, key: str = "", descriptors: Sequence[int] = (), **facts: object) -> None:
        self._supervisor.request(kind, key, descriptors, facts)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    descriptors.clear()
