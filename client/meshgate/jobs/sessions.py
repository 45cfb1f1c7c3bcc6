"""The sessions of a job: that of this process, and others, listed, detached, and taken over by another process.

A job type supports detached sessions by implementing ``_dialer`` and ``_mesh_sizes``.
"""

from __future__ import annotations

import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from meshgate.errors import GatewayError, JobError, JobNotRunning, JobUnsupported
from meshgate.jobs.saved import DEFAULT_JOB_PATH, read_record
from meshgate.jobs.state import JobState, attach_meshes

if TYPE_CHECKING:
    from meshgate.proxies import HostMeshProxy
    from meshgate.proxies.attached import AttachedSession
    from meshgate.proxies.client import Client
    from meshgate.session.dialing import Dialer
    from meshgate.session.futures import FutureProxy

MAX_NAME = 128
MIN_PREFIX = 4  # characters of an id that name a session
BUSY_TIMEOUT = 5.0  # seconds in which a session is looked for again while the engine of another one does not answer
ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True)
class SessionInfo:
    """A session of a job, as its gateway describes it. ``age`` is in seconds.

    ``detached``: it outlives its driver, and ``job.attach()`` can take it over. ``holder`` is the process that holds
    it, or held it last; ``connected``: that process is connected now. ``error``: why the rest is missing.
    """

    id: str
    name: str = ""
    detached: bool = False
    age: float = 0.0
    connected: bool = False
    holder: str = ""
    takeovers: int = 0
    lease: float = 0.0
    hosts: tuple[str, ...] = ()
    procs: tuple[str, ...] = ()
    actors: tuple[str, ...] = ()
    calls_in_flight: int = 0
    calls_finished: int = 0
    unread_lines: int = 0
    code_version: str | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class EndedSession:
    """A session that has ended ``ago`` seconds ago, with the ``reason`` and, if its engine died, its last ``output``.
    ``kind``: ``died``, ``ended`` or ``expired``. ``name``: if it was detached."""

    id: str
    name: str = ""
    kind: str = ""
    reason: str = ""
    output: str = ""
    ago: float = 0.0

    def __str__(self) -> str:
        ended = time.localtime(time.time() - self.ago)
        when = time.strftime("%H:%M" if self.ago < 12 * 3600 else "%a %d %b, %H:%M", ended)
        output = f"; its last output:\n{self.output.rstrip()}" if self.output.strip() else ""
        return f"session {self.name or self.id[:8]!r} ended at {when}: {self.reason}{output}"


SessionT = TypeVar("SessionT", SessionInfo, EndedSession)


@dataclass(frozen=True, kw_only=True)
class SessionList:
    """What a gateway reports of the caller's sessions: those of its job, those that have ended and may be looked for,
    both oldest first, and why it replaced an earlier gateway of the job, if it did."""

    sessions: list[SessionInfo]
    ended: list[EndedSession] = field(default_factory=list)  # an earlier gateway does not report any
    restarted: str = ""


class SessionAccess(ABC):
    """What a job offers of its sessions: the one of this process, and those that outlive their drivers.

    ``JobTrait`` inherits these methods.
    """

    _lock: threading.RLock
    _scoped: bool
    _cache_file: str | None

    def __init__(self) -> None:
        super().__init__()
        self._client: Client | None = None  # the session, once state() has connected
        self._attached: JobState | None = None  # the meshes attached in that session
        self._before_attaching: Callable[[Client], None] | None = None  # is called with the session
        self._detached: bool | str = False  # whether sessions outlive their driver, or under which name

    @property
    @abstractmethod
    def _running(self) -> SessionAccess | None: ...

    @abstractmethod
    def _find_running(self, path: str | None) -> SessionAccess: ...

    @abstractmethod
    def _dialer(self) -> Dialer: ...

    @abstractmethod
    def _outlive_driver(self) -> None: ...

    @abstractmethod
    def dump(self, filename: str) -> None: ...

    def _mesh_sizes(self) -> Mapping[str, int]:
        """The number of hosts of each mesh of the running job. For job types."""
        raise JobUnsupported(f"a {type(self).__name__} does not support detached sessions")

    def detach(self, name: str | None = None, cached_path: str | None = DEFAULT_JOB_PATH) -> str:
        """Keeps the session running when this process leaves, however it leaves, for the session's lease.

        Another process then takes it over with ``attach``. ``name`` is for people; the default is the start of the
        session's id. Returns the name. Saves the job in ``cached_path`` unless it is saved. The results of
        earlier calls are kept, except those that have arrived here: read them. Results that are on their way are sent
        back, and TimeoutError is raised if that takes too long, as behind a call that waits to be sent: the session is
        detached nevertheless, and another ``detach`` waits again. Raises JobNotRunning before ``state()``.
        """
        with self._lock:
            if name is not None:
                check_name(name)
            running = self._running
            if running is None or running._client is None or running._client.closed:
                raise JobNotRunning(f"cannot detach {self!r}: it has no session. Call state() before detach()")
            running._dialer()  # raises if this type of job cannot be detached
            self._scoped = False
            name, returned = _detach(running._client, name)
            self._detached = running._detached = name
            if cached_path is not None and self._cache_file is None:
                self.dump(cached_path)
                self._cache_file = cached_path
            else:
                running._outlive_driver()
            returned.get(running._client.settings.connect_timeout)
            return name

    def sessions(self, cached_path: str | None = DEFAULT_JOB_PATH) -> list[SessionInfo]:
        """The sessions of the running job, oldest first; none if it is not running. Raises GatewayError."""
        return self._list_sessions(cached_path).sessions

    def _list_sessions(self, cached_path: str | None) -> SessionList:
        with self._lock:
            try:
                return _read_sessions(self._find_running(cached_path)._dialer())
            except JobNotRunning:
                return SessionList(sessions=[])

    def attach(
        self, name: str | None = None, *, replay: bool = False, cached_path: str | None = DEFAULT_JOB_PATH
    ) -> AttachedSession:
        """Takes over a detached session of the running job: its meshes, calls, channels and output.

        ``name`` is the session's name or the start of its id; without it, the only detached session. If another process
        holds the session, that one gets SessionTakenOverError. What actors printed since is printed now, and with
        ``replay`` everything that is kept. Finds the job as ``state`` does, but never starts one. Raises JobNotRunning,
        JobError if the session cannot be determined, and GatewayError.
        """
        with self._lock:
            running = self._find_running(cached_path)
            session = running._take_over(name, replay=replay)
            self._scoped = False
            self._detached = running._detached = session.name  # also of the next session, if this one is lost
            running._outlive_driver()  # a ``with`` block may have made this job end with its process
            return session

    def end_session(self, name: str, cached_path: str | None = DEFAULT_JOB_PATH) -> SessionInfo:
        """Ends a session of the running job, whichever program holds it, and its processes; returns what it was.

        ``name`` is the session's name or the start of its id. Calls of a program that holds it raise GatewayError. The
        job and its other sessions stay. Raises JobNotRunning, JobError if the session cannot be determined,
        AuthenticationError if it belongs to someone else and ``name`` is its whole id, and GatewayError.
        """
        from meshgate.session.gateway_client import request_json  # noqa: PLC0415 - few programs end others' sessions

        if not name:  # as of a shell's variable that is not set
            raise JobError("the name of the session is empty; run `meshgate sessions` to list the sessions")
        with self._lock:
            dialer = self._find_running(cached_path)._dialer()
        if ID.fullmatch(name):  # if it is not listed, the gateway reports whose it is
            found = next((each for each in _read_sessions(dialer).sessions if each.id == name), SessionInfo(id=name))
        else:
            found = _find_session(dialer, name, to="end the session")
        request_json(dialer, f"/v1/sessions/{found.id}/end", b"")
        return found

    def _take_over(self, name: str | None, *, replay: bool) -> AttachedSession:
        """``attach`` to this running job."""
        from meshgate.proxies.attached import take_over  # noqa: PLC0415 - few programs do, and none before its job runs
        from meshgate.proxies.client import Client  # noqa: PLC0415

        if self._client is not None and not self._client.closed:
            raise JobError(
                f"{self!r} already has a session in this process: attach with another job object, from job_load()"
            )
        found = _find_session(self._dialer(), name)
        client = Client.connect(self._dialer(), session_id=found.id, mesh_sizes=self._mesh_sizes())
        try:
            session = take_over(client, replay=replay, timeout=client.settings.connect_timeout)
        except BaseException:
            client.abandon()
            raise
        self._client = client
        self._attached = JobState({name: mesh for name, mesh in session.hosts.items() if name in self._mesh_sizes()})
        return session

    def _connect(self) -> Client:
        """A client in a new session, which is detached if the job is. For job types."""
        from meshgate.proxies.client import Client  # noqa: PLC0415 - imported once the job runs, not with its type

        client = Client.connect(self._dialer())
        if self._detached:
            try:
                _detach(client, self._detached if isinstance(self._detached, str) else None)
            except BaseException:
                client.close()  # otherwise the gateway may keep a detached session that no program knows
                raise
            self._outlive_driver()
        return client

    def _attach_meshes(self, meshes: Mapping[str, int]) -> JobState:
        """``meshes`` in the open session, or in a new one if there is none. For job types."""
        if self._client is not None and self._client.closed:
            self._client.close()  # the session is over; also end its threads
            self._client = None
        if self._client is None:
            self._client = self._connect()
        if self._before_attaching is not None:
            self._before_attaching(self._client)
        self._attached = attach_meshes(self._client, meshes, self._attached)
        return self._attached

    def _reachable_hosts(self) -> Mapping[str, HostMeshProxy]:
        """The host meshes of the open session; none without one."""
        if self._attached is None or self._client is None or self._client.closed:
            return {}
        return self._attached._hosts


def check_name(name: object) -> None:
    """Raises TypeError or ValueError if ``name`` cannot be the name of a session."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a session must be a string, not {name!r}")
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise ValueError(f"the name of a session must have 1 to {MAX_NAME} printable characters, not {name[:200]!r}")


def check_detached(detached: object) -> bool | str:
    """The option ``detached`` of a job. Raises TypeError or ValueError."""
    if isinstance(detached, bool):
        return detached
    check_name(detached)
    return str(detached)


def _detach(client: Client, name: str | None) -> tuple[str, FutureProxy[Any]]:
    """Detaches the session of ``client``. Returns its name, by default the start of its id, and a future that settles
    once results that were on their way have been sent back."""
    name = name or client.detached or client.session_id[:8]
    noted, returned = client.start_detaching(name)
    noted.get(client.settings.connect_timeout)
    return name, returned


def _read_sessions(dialer: Dialer) -> SessionList:
    """The sessions of the gateway behind ``dialer``. Raises GatewayError."""
    from meshgate.session.gateway_client import request_json  # noqa: PLC0415 - few programs ask

    try:
        return read_record(SessionList, request_json(dialer, "/v1/sessions"))
    except ValueError as error:
        raise GatewayError(f"{dialer} sent an invalid list of sessions: {error}") from error


def _find_session(dialer: Dialer, name: str | None, *, to: str = "attach") -> SessionInfo:
    """``choose_session`` of those behind ``dialer``. As long as the engine of a session does not answer, which may be
    the one and has no name then in an earlier gateway, it looks again, for ``BUSY_TIMEOUT`` seconds."""
    deadline = time.monotonic() + BUSY_TIMEOUT
    while True:
        known = _read_sessions(dialer)
        try:
            return choose_session(known, name, to=to)
        except JobError:
            if time.monotonic() > deadline or not any(each.error for each in known.sessions):
                raise
        time.sleep(0.2)


def choose_session(known: SessionList, name: str | None, *, to: str = "attach") -> SessionInfo:
    """The session called ``name``, by name or start of its id; the only detached one if there is no name.

    Raises JobError if there is not exactly one: it cannot ``to``.
    """
    if name is None:
        found = [each for each in known.sessions if each.detached]
        ended = [each for each in known.ended if each.name]
        wanted = "a detached session"
    else:
        found, ended = _called(known.sessions, name), _called(known.ended, name)
        wanted = f"session {name!r}"
    listed = "; ".join(_described(each) for each in known.sessions) or "none"
    if not found:
        why = f". Sessions end with their gateway: {known.restarted}" if known.restarted else ""
        last = f". The {ended[-1]}" if ended else ""
        raise JobError(f"cannot {to}: the job does not have {wanted}. Its sessions are: {listed}{why}{last}")
    if len(found) > 1:
        hint = ". job.end_session(id) ends one that is no longer needed" if to == "attach" else ""
        raise JobError(f"cannot {to}: {len(found)} sessions match. Name one by its id: {listed}{hint}")
    return found[0]


def _called(sessions: Sequence[SessionT], name: str) -> list[SessionT]:
    found = [each for each in sessions if each.name == name]
    if not found and len(name) >= MIN_PREFIX:
        found = [each for each in sessions if each.id.startswith(name)]
    return found


def _described(info: SessionInfo) -> str:
    state = f"{'detached' if info.detached else 'not detached'}, {info.age:.0f} s old"
    if info.error:  # an earlier gateway does not know a name then
        state = f"{'detached, ' if info.detached else ''}not known further: {info.error}"
    return f"{info.name or info.id[:8]} (id {info.id[:8]}, {state})"
