"""The sessions of a job: listed, detached, and taken over by another process.

Functions of ``JobTrait``, whose methods document them. A job type supports detached sessions by implementing
``_dialer`` and ``_mesh_sizes``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from meshgate.errors import GatewayError, JobError, JobFileError, JobNotRunning
from meshgate.jobs.state import JobState
from meshgate.proxies.attached import AttachedSession, take_over
from meshgate.proxies.client import Client
from meshgate.session.dialing import Dialer
from meshgate.session.gateway_http import get_json

__all__ = ["SessionInfo", "attach", "check_name", "choose_session", "detach_client", "find_running", "sessions_of"]

MAX_NAME = 128
MIN_PREFIX = 4  # characters of an id that name a session


class SessionInfo(BaseModel):
    """A session of a job, as its gateway describes it. ``age`` is in seconds.

    ``detached``: it outlives its driver, and ``job.attach()`` can take it over. ``holder`` is the process that holds
    it, or held it last; ``connected``: that process is connected now. ``error``: why the rest is missing.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

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


class Job(Protocol):
    """What attaching needs of a running job."""

    _client: Client | None
    _attached: JobState | None

    def _dialer(self) -> Dialer: ...

    def _mesh_sizes(self) -> Mapping[str, int]: ...


class SavedJob(Protocol):
    @property
    def active(self) -> bool: ...

    def can_run(self, spec: Any) -> bool: ...


J = TypeVar("J", bound=SavedJob)


def check_name(name: object) -> None:
    """Raises TypeError or ValueError if ``name`` cannot be the name of a session."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a session must be a string, not {name!r}")
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise ValueError(f"the name of a session must have 1 to {MAX_NAME} printable characters, not {name[:200]!r}")


def find_running(path: str, load: Callable[[str], J], spec: J) -> J:
    """The running job in the file ``path`` that can run ``spec``. Changes nothing. Raises JobNotRunning."""
    try:
        job = load(path)
    except FileNotFoundError:
        raise JobNotRunning(f"{spec!r} is not running here, and there is no saved job in {path}") from None
    except JobFileError as error:
        raise JobNotRunning(f"{spec!r} is not running here: {error}") from error
    if not job.active or not job.can_run(spec):
        raise JobNotRunning(f"the job in {path} has ended, or has a different specification than {spec!r}")
    return job


def detach_client(client: Client, name: str | None) -> str:
    """Detaches the session of ``client``; returns its name, by default the start of its id."""
    name = name or client.detached or client.session_id[:8]
    client.detach(name).get(client.settings.connect_timeout)
    return name


def sessions_of(job: Job) -> list[SessionInfo]:
    """The sessions of a running job, oldest first. Raises GatewayError."""
    dialer = job._dialer()
    try:
        return [SessionInfo.model_validate(each) for each in get_json(dialer, "/v1/sessions")["sessions"]]
    except (KeyError, ValidationError) as error:
        raise GatewayError(f"{dialer} sent an invalid list of sessions: {error}") from error


def attach(job: Job, name: str | None, *, replay: bool) -> AttachedSession:
    """Takes over a session of the running ``job``, which has none in this process."""
    if job._client is not None and not job._client.closed:
        raise JobError(
            f"{job!r} already has a session in this process: attach with another job object, from job_load()"
        )
    found = choose_session(sessions_of(job), name)
    client = Client.connect(job._dialer(), session_id=found.id, mesh_sizes=job._mesh_sizes())
    try:
        session = take_over(client, replay=replay, timeout=client.settings.connect_timeout)
    except BaseException:
        client.abandon()
        raise
    job._client = client
    job._attached = JobState({name: mesh for name, mesh in session.hosts.items() if name in job._mesh_sizes()})
    return session


def choose_session(sessions: Sequence[SessionInfo], name: str | None) -> SessionInfo:
    """The session called ``name``, by name or start of its id; the only detached one if there is no name.

    Raises JobError if there is not exactly one.
    """
    known = "; ".join(_described(each) for each in sessions) or "none"
    if name is None:
        found = [each for each in sessions if each.detached]
        wanted = "a detached session"
    else:
        found = [each for each in sessions if each.name == name]
        if not found and len(name) >= MIN_PREFIX:
            found = [each for each in sessions if each.id.startswith(name)]
        wanted = f"session {name!r}"
    if not found:
        raise JobError(f"cannot attach: the job does not have {wanted}. Its sessions are: {known}")
    if len(found) > 1:
        raise JobError(f"cannot attach: {len(found)} sessions match. Name one by its id: {known}")
    return found[0]


def _described(info: SessionInfo) -> str:
    state = "detached" if info.detached else "not detached"
    return f"{info.name or info.id[:8]} (id {info.id[:8]}, {state}, {info.age:.0f} s old)"
