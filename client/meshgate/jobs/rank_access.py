"""What a job offers besides its meshes: its status, and a way to its hosts' files.

``JobTrait`` inherits these methods. They use the job's own session and never start or end a job.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from typing_extensions import Self

from meshgate.errors import JobError, JobNotRunning
from meshgate.ranks import OWN_MESHES

if TYPE_CHECKING:
    from meshgate.jobs.state import JobState
    from meshgate.proxies import HostMeshProxy
    from meshgate.ranks.debug import EditorDebugging
    from meshgate.ranks.exec import Executed
    from meshgate.ranks.forward import ForwardedPort
    from meshgate.ranks.stacks import Stacks
    from meshgate.ranks.telemetry import MeshAdmin, MeshAdminConfig, QueryEngineClient, Telemetry, TelemetryConfig
    from meshgate.session.dialing import Dialer
    from meshgate.transfer.download import Pulled
    from meshgate_wire.status import JobStatus, OutputPage

MANY_SESSIONS = 100  # a gateway has at most 64 unless it is configured, and accepts about 200 in a request


class RankAccess(ABC):
    """``ranks`` are those of the hosts of ``mesh``, which is the name of a host mesh (default: the only one)."""

    _lock: threading.RLock

    def __init__(self) -> None:
        super().__init__()
        self._admin: MeshAdmin | None = None
        self._telemetry: Telemetry | None = None

    @property
    @abstractmethod
    def _running(self) -> RankAccess | None: ...

    @abstractmethod
    def _state(self) -> JobState: ...

    @abstractmethod
    def _dialer(self) -> Dialer: ...

    @abstractmethod
    def _has_ended(self) -> bool: ...

    @abstractmethod
    def _is_running(self) -> bool: ...

    def status(self) -> JobStatus:
        """The job as its gateway sees it: hosts, sessions with their processes and actors, and calls in flight.

        Raises JobNotRunning before ``state()``, and GatewayError if the gateway cannot be reached.
        """
        from meshgate.session.gateway_client import request_json  # noqa: PLC0415  (few programs ask)
        from meshgate_wire.status import JobStatus  # noqa: PLC0415

        return JobStatus.model_validate(request_json(self._require_running("status")._dialer(), "/v1/status"))

    def _output(self, after: dict[str, int]) -> OutputPage:
        """What actors of all sessions printed after the line numbered ``after[session]``. If ``after`` has many
        sessions, removes those that have ended from it: gateways limit the length of a request."""
        from meshgate.session.gateway_client import request_json  # noqa: PLC0415
        from meshgate_wire.status import OutputPage  # noqa: PLC0415

        if len(after) > MANY_SESSIONS:
            for ended in after.keys() - {each.session for each in self.status().sessions}:
                del after[ended]
        query = "&".join(f"{session}={number}" for session, number in after.items())
        return OutputPage.model_validate(request_json(self._require_running("logs")._dialer(), f"/v1/output?{query}"))

    def pull(
        self,
        remote: str,
        local: str | os.PathLike[str],
        ranks: Sequence[int] | int | None = None,
        mesh: str | None = None,
    ) -> Pulled:
        """Copies the file or directory ``remote`` from the job's hosts to ``local``, with a progress bar.

        ``mesh`` names the host mesh (default: the only one), ``ranks`` its hosts (default: all). From one host, the
        file or the contents of the directory go into ``local``; from several, into ``local/rank-<n>``. Skips files that
        are already here and resumes an interrupted pull. Raises PullFailed, JobNotRunning before ``state()``, and
        ValueError on an unknown mesh or rank.
        """
        from meshgate.transfer.pull import pull  # noqa: PLC0415  (few programs pull)

        return pull(self._hosts_of("pull", mesh), remote, local, ranks)

    def exec(
        self,
        command: Sequence[str],
        ranks: Sequence[int] | int | None = None,
        mesh: str | None = None,
        *,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        capture_output: bool = False,
        stdin: IO[bytes] | None = None,
        timeout: float | None = None,
    ) -> Executed:
        """Runs ``command`` on the job's hosts, with the environment and the working directory of the workers.

        ``mesh`` names the host mesh (default: the only one), ``ranks`` its hosts (default: all). Prints the output as
        it arrives, labelled if there are several hosts, or, with ``capture_output``, keeps it in the result. ``env`` is
        added to the environment; what ``stdin`` has is sent to each command as it comes, until the commands have ended;
        what you have left in its buffer goes with what comes next. The result has the exit code of each rank. Raises
        TimeoutError after ``timeout`` seconds, and what reading ``stdin`` raises; these and an interrupt end the
        commands. Raises JobNotRunning before ``state()``, and ValueError on an unknown mesh or rank.
        """
        from meshgate.ranks.exec import execute  # noqa: PLC0415  (few programs run commands)

        hosts = self._hosts_of("exec", mesh)
        return execute(
            hosts, command, ranks, env=env, workdir=workdir, capture=capture_output, stdin=stdin, timeout=timeout
        )

    def shell(
        self,
        rank: int = 0,
        mesh: str | None = None,
        *,
        command: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
    ) -> int:
        """Opens a terminal on host ``rank`` in this terminal, and returns the exit code of its shell.

        ``command`` is run in place of the shell. Keys, Ctrl-C too, and the size of this terminal go to the host. Raises
        ValueError if there is no terminal here, or on an unknown mesh or rank, and JobNotRunning before ``state()``.
        """
        from meshgate.ranks.exec import run_shell  # noqa: PLC0415  (few programs open one)

        return run_shell(self._hosts_of("shell", mesh), rank, command, env=env, workdir=workdir)

    def forward(
        self,
        port: int,
        rank: int = 0,
        mesh: str | None = None,
        *,
        local_port: int | None = None,
        reverse: bool = False,
    ) -> ForwardedPort:
        """Makes ``port`` of host ``rank`` available on this machine, at ``local_port`` (default: a free one).

        With ``reverse``, makes ``local_port`` of this machine (default: ``port``) available on the host, at ``port``
        (0: at a free one). Both sides listen on loopback only. The result has the ``port`` to connect to, works
        until it is closed, and is a context manager. Raises JobError if the port is in use, ValueError on an unknown
        mesh or rank, and JobNotRunning before ``state()``.
        """
        from meshgate.ranks.forward import forward  # noqa: PLC0415  (few programs forward ports)

        return forward(self._hosts_of("forward", mesh), port, rank, local_port=local_port, reverse=reverse)

    def debug(
        self, rank: int | None = None, procs: str | None = None, mesh: str | None = None
    ) -> EditorDebugging | None:
        """Debugs the actors that have stopped at ``breakpoint()``, in this terminal or notebook.

        The commands are those of Monarch's debugger; ``help`` lists them. With ``rank``, starts debugpy in process
        ``rank`` of the proc mesh named ``procs`` (default: the only one) instead, and returns the ``port`` on this
        machine to which an editor can attach. ``mesh`` names the host mesh (default: the only one). Raises JobError if
        debugpy does not start, JobNotRunning before ``state()``, and ValueError on an unknown mesh.
        """
        from meshgate.ranks import debug  # noqa: PLC0415  (few programs debug)

        hosts = self._hosts_of("debug", mesh)
        if rank is not None:
            return debug.debug_in_editor(hosts, procs or self._only_procs(), rank)
        with debug.debugging(hosts) as debugger:
            debug.run_console(debugger, input, lambda text: print(text, end="", flush=True))  # noqa: T201
        return None

    def _only_procs(self) -> str:
        """The name of the only proc mesh of the job's sessions. Raises ValueError."""
        meshes = (mesh for session in self.status().sessions for mesh in session.meshes)
        names = {mesh.name for mesh in meshes if mesh.kind == "procs"} - OWN_MESHES
        if len(names) != 1:
            known = ", ".join(sorted(names)) or "there is none"
            raise ValueError(f"debug(procs=…): name one of the proc meshes: {known}")
        return names.pop()

    def stacks(self, ranks: Sequence[int] | int | None = None, mesh: str | None = None) -> Stacks:
        """The Python stacks of every process of the job, of all sessions, also while they are busy.

        ``ranks`` are those of the processes in their proc meshes (default: all), ``mesh`` names a host mesh (default:
        all of them). Printed, equal stacks of many ranks are shown once. Raises JobNotRunning before ``state()``, and
        ValueError on an unknown mesh or rank.
        """
        from meshgate.ranks.stacks import read_stacks  # noqa: PLC0415  (few programs ask)

        if mesh is not None:
            return read_stacks({mesh: self._hosts_of("stacks", mesh)}, ranks)
        with self._lock:
            return read_stacks(self._require_running("stacks")._state()._hosts, ranks)

    def enable_admin(self, config: MeshAdminConfig | None = None, **kwargs: Any) -> Self:
        """The next ``state()`` starts Monarch's admin server on the first host, and has its address on this machine as
        ``admin_url``. Returns the job. ``kwargs`` are those of ``MeshAdminConfig``, if there is no ``config``."""
        from meshgate.ranks.telemetry import MeshAdmin, MeshAdminConfig  # noqa: PLC0415  (few programs ask)

        self._admin = MeshAdmin(_config(MeshAdminConfig, config, kwargs))
        return self

    def enable_telemetry(
        self,
        config: TelemetryConfig | None = None,
        *,
        mesh_admin_config: MeshAdminConfig | None = None,
        **kwargs: Any,
    ) -> Self:
        """The next ``state()`` makes its session collect Monarch's telemetry, and has ``query_engine_client`` for SQL
        queries, ``telemetry_url``, ``dashboard_url`` and, as with ``enable_admin``, ``admin_url``. Returns the job.

        What the session spawned before is not recorded. ``kwargs`` are those of ``TelemetryConfig``, if there is no
        ``config``.
        """
        from meshgate.ranks.telemetry import Telemetry, TelemetryConfig  # noqa: PLC0415  (few programs ask)

        self._close_telemetry()
        self._telemetry = Telemetry(_config(TelemetryConfig, config, kwargs))
        if mesh_admin_config is not None or self._admin is None:
            self.enable_admin(mesh_admin_config)
        return self

    def telemetry_query_client(self) -> QueryEngineClient:
        """For SQL queries to the telemetry of the job's session. Raises JobNotRunning before ``state()`` and when the
        job has ended, and JobError without ``enable_telemetry()``: both are RuntimeErrors, as in Monarch."""
        return self._require_telemetry("telemetry_query_client").query_client()

    def profile(self, *, on_trace_ready: Callable[[Any], object] | None = None) -> Any:
        """Monarch's context manager that records the traces of a block of code, for ``export_perfetto_trace()``. Needs
        torchmonarch on this machine. Raises as ``telemetry_query_client``, and JobUnsupported without torchmonarch."""
        return self._require_telemetry("profile").profile(on_trace_ready)

    def _require_telemetry(self, operation: str) -> Telemetry:
        running = self._require_running(operation)
        # A type without ``_is_running`` may say no because the job must not be reused, and its telemetry be active.
        started = self._telemetry is not None and self._telemetry.started
        if running._has_ended() or (self._telemetry is not None and not started and not running._is_running()):
            raise JobNotRunning(
                f"{operation}() of {self!r}: the job is no longer running or healthy. Call state() to start it again"
            )
        if self._telemetry is None:
            raise JobError(
                f"{operation}() of {self!r}: the job has no distributed telemetry configured. Call enable_telemetry(), "
                f"and then state(), before {operation}()"
            )
        if not started:
            raise JobError(
                f"{operation}() of {self!r}: distributed telemetry is not active. Call state() before {operation}()"
            )
        return self._telemetry

    def _with_services(self, state: JobState) -> JobState:
        """Starts what ``enable_admin`` and ``enable_telemetry`` have asked for, and notes the addresses."""
        if self._admin is not None:
            state.admin_url = self._admin.url(state._hosts)
        if self._telemetry is not None:
            state.query_engine_client, state.telemetry_url = self._telemetry.query_client(), self._telemetry.url
            state.dashboard_url = state.telemetry_url if self._telemetry.config.include_dashboard else None
        return state

    def _close_services(self) -> None:
        if self._admin is not None:
            self._admin.close()
        self._close_telemetry()

    def _close_telemetry(self) -> None:
        if self._telemetry is not None:
            self._telemetry.close()

    def _require_running(self, operation: str) -> RankAccess:
        running = self._running
        if running is None:
            raise JobNotRunning(f"{operation}() of {self!r}: it is not running. Call state() before {operation}()")
        return running

    def _hosts_of(self, operation: str, mesh: str | None) -> HostMeshProxy:
        """The host mesh named ``mesh``, or the only one. Raises ValueError."""
        with self._lock:
            meshes = self._require_running(operation)._state()._hosts
        names = ", ".join(sorted(meshes))
        if mesh is None and len(meshes) > 1:
            raise ValueError(f"{operation}(mesh=…): the job has several meshes; name one of {names}")
        if mesh is not None and mesh not in meshes:
            raise ValueError(f"{operation}(mesh={mesh!r}): unknown mesh; the job's meshes are {names}")
        return meshes[mesh or next(iter(meshes))]


def _config(kind: Any, config: Any, fields: Mapping[str, Any]) -> Any:
    """``config`` as one of our dataclass ``kind``: it may be Monarch's, of a release that has fewer fields. Without a
    ``config``, one with these ``fields``."""
    if config is None:
        return kind(**fields)
    if type(config).__name__ != kind.__name__:
        raise TypeError(f"expected a {kind.__name__}, not {config!r}")
    names = [each.name for each in dataclasses.fields(kind) if hasattr(config, each.name)]
    return kind(**{name: getattr(config, name) for name in names})
