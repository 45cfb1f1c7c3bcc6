"""Engine processes and the pool of prestarted ones.

Starting Monarch takes a third of a second, so the pool starts an engine before a session needs it. Messages to an
engine that is still starting wait in its control channel, so callers need not distinguish the two.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence

from meshgate_gateway.child_process import ChildProcess, ExitStatus
from meshgate_gateway.control import AssignSession, ControlChannel, ControlMessage, ReportState, control_pair
from meshgate_gateway.logs import EventLog
from meshgate_gateway.supervisor.link import SupervisedProcess, SupervisorLink

log = EventLog()

ENGINE_KEY = "engine/"  # begins the keys under which the supervisor knows engines
REFILL_DELAY = 3.0  # seconds; lets the processes of a new session start first, because its user waits for them


class EngineProcess:
    """One engine process and the control channel to it, both of which outlive this server.

    The next server learns ``session``, ``owner``, ``meshes``, the session's ``name`` and the ``run`` that holds it,
    once they are known.
    """

    def __init__(self, process: SupervisedProcess, control: socket.socket | None) -> None:
        self.adopted = False
        self.session: str | None = process.note.get("session")
        self.owner: str = process.note.get("owner", "")
        self.meshes: frozenset[str] = frozenset(process.note.get("meshes", ()))
        self.name: str = process.note.get("name", "")
        self.run: str = process.note.get("run", "")
        self._process = process
        self._child = ChildProcess(process, on_line=self._log_line)
        self._channel = None if control is None else ControlChannel(control)

    @classmethod
    def start(
        cls,
        supervisor: SupervisorLink,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: int | None = None,
    ) -> EngineProcess:
        """Starts ``command --control-fd N``, with ``--output-fd M`` if the descriptor ``output`` is given. Raises
        OSError."""
        ours, theirs = control_pair()
        arguments = [*command, "--control-fd", "fd:0"]
        with theirs:
            passed = [theirs.fileno()]
            if output is not None:
                arguments += ["--output-fd", "fd:1"]
                passed.append(output)
            try:
                process = supervisor.start(
                    f"{ENGINE_KEY}{uuid.uuid4()}", {}, arguments, environment, passed, [ours.fileno()]
                )
            except OSError:
                ours.close()
                raise
        return cls(process, ours)

    @classmethod
    def adopt(cls, process: SupervisedProcess) -> EngineProcess:
        """The engine of an earlier server, which may be about to end, or have exited."""
        engine = cls(process, socket.socket(fileno=process.kept[0]) if process.kept else None)
        engine.adopted = True
        return engine

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child.running

    def send(self, message: ControlMessage, descriptors: Sequence[int] = ()) -> bool:
        """Returns False if the engine has exited; the reader of ``receive`` then sees the end of the channel."""
        return self._channel is not None and self._channel.send(message, descriptors)

    def assign(self, session: str, owner: str, lease: float) -> None:
        """Assigns a session to this engine. Repeated by each further server."""
        self.session, self.owner = session, owner
        self._annotate()
        self.send(AssignSession(session=session, lease=lease))
        if self.adopted:
            self.send(ReportState())

    def add_mesh(self, mesh: str) -> None:
        """Records that the session receives the hosts of ``mesh``."""
        self.meshes |= {mesh}
        self._annotate()

    def set_name(self, name: str) -> None:
        """Records that the session is detached, under this name."""
        self.name = name
        self._annotate()

    def set_run(self, run: str) -> None:
        """Records whose secret the last connection has presented, if that of a run."""
        if run != self.run:
            self.run = run
            self._annotate()

    async def receive(self) -> ControlMessage | None:
        """The next message; None once the engine has closed the channel or exited. For a single reader.

        Raises ValueError for an invalid message.
        """
        received = await self._channel.receive() if self._channel is not None else None
        return received[0] if received else None

    async def stop(self, timeout: float) -> ExitStatus:
        """Closes the channel, waits up to ``timeout`` seconds for the exit, then kills the process and its children."""
        self.close_channel()
        return await self._child.stop(timeout)

    def close_channel(self) -> None:
        """Closes both copies of this end of the channel. Must not be called while ``receive`` waits."""
        if self._channel is not None:
            self._channel.close()
            self._process.release()

    def forget(self) -> None:
        """Nothing about this engine concerns a further server any more. It must have exited, or been stopped."""
        if self._channel is not None:
            self._channel.close()
        self._process.forget()

    def _annotate(self) -> None:
        of_session = {"session": self.session, "owner": self.owner, "meshes": sorted(self.meshes)}
        self._process.annotate({**of_session, "name": self.name, "run": self.run})

    def kill(self) -> None:
        self._child.signal(signal.SIGKILL)

    def _log_line(self, line: str) -> None:
        log.info("engine output", session=self.session, pid=self.pid, line=line)


class EnginePool:
    """Engine processes for sessions, of which ``size`` are started ahead of time: at the start of the gateway, and,
    while ``refills`` is set, after a session has taken one."""

    def __init__(self, start: Callable[[], EngineProcess], size: int) -> None:
        self._start, self._size = start, size
        self.refills = True
        self._idle: list[EngineProcess] = []
        self._refill: asyncio.TimerHandle | None = None

    def adopt(self, engines: Iterable[EngineProcess]) -> None:
        """Takes over prestarted engines of an earlier server."""
        self._idle += engines

    def fill(self) -> None:
        """Starts the missing engines. An engine that exits early is replaced after the next ``acquire``."""
        self._refill = None
        self._drop_dead()
        try:
            while len(self._idle) < self._size:
                self._idle.append(self._start())
        except OSError as error:
            log.warning("engine not prestarted", error=str(error))

    def acquire(self) -> EngineProcess:
        """A prestarted engine, or a new one if there is none. Raises OSError."""
        self._drop_dead()
        if self.refills and self._refill is None:
            self._refill = asyncio.get_running_loop().call_later(REFILL_DELAY, self.fill)
        return self._idle.pop(0) if self._idle else self._start()

    async def close(self) -> None:
        """Kills the prestarted engines, which hold no session."""
        if self._refill is not None:
            self._refill.cancel()
        idle, self._idle = self._idle, []
        for engine in idle:
            engine.kill()
        await asyncio.gather(*(engine.stop(0) for engine in idle))

    def _drop_dead(self) -> None:
        for dead in [engine for engine in self._idle if not engine.running]:
            log.warning("engine exited before it had a session", pid=dead.pid)
            dead.forget()
            self._idle.remove(dead)
