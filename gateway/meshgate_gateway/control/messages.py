"""The messages that the server and an engine exchange, as JSON; among them what an engine counts for the metrics."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

from meshgate_wire.messages import Host
from meshgate_wire.models.fields import shorten

MAX_REASON = 16_384  # characters; JSON takes up to six bytes for one, and a message may have 160 KiB

# Upper bounds of histogram buckets, in seconds. A call takes a millisecond or a training step; a save, a tenth second.
CALL_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
SYNC_BOUNDS = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
Outcome: TypeAlias = Literal["ok", "failed"]


class Samples(BaseModel):
    """Durations as counts per bucket; the last bucket has those above all bounds. ``seconds`` is their sum."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    buckets: tuple[int, ...] = ()
    seconds: float = 0.0


class EngineCounts(BaseModel):
    """``calls`` by outcome, with the durations of those that waited for replies; ``casts`` are calls without replies.
    ``syncs``: durations from a version's offer to the last host. Bytes are those of the client's connections."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    type: Literal["counts"] = "counts"
    calls: dict[Outcome, int] = {}
    call_times: Samples = Samples()
    casts: int = 0
    sync_times: Samples = Samples()
    bytes_received: int = 0
    bytes_sent: int = 0
    lines: int = 0


def _shorten(reason: object) -> object:
    return shorten(reason, MAX_REASON) if isinstance(reason, str) else reason


Reason: TypeAlias = Annotated[str, BeforeValidator(_shorten)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


# --- server to engine -------------------------------------------------------------------------------------


class AssignSession(_Model):
    """Assigns ``session`` to a prestarted engine. The session outlives its connection by ``lease`` seconds."""

    type: Literal["assign"] = "assign"
    session: str
    lease: float


class NewConnection(_Model):
    """Passes the descriptor of an authenticated connection, which replaces any earlier one of the session.

    ``head`` is the HTTP request head, decoded as Latin-1, without the credentials. ``proof_key``, unless it is empty,
    proves to the client that the response is that of ``gateway``. ``run``: that whose secret the client has presented.
    """

    type: Literal["connection"] = "connection"
    head: str
    proof_key: str = ""
    gateway: str = ""
    run: str = ""


class RunEnded(_Model):
    """The engine must close the connections that the secret of ``run`` has opened: it opens nothing any more."""

    type: Literal["run_ended"] = "run_ended"
    run: str


class HostsReply(_Model):
    """The hosts of ``mesh`` in rank order, or the reason that there are none. ``more``: further messages follow."""

    type: Literal["hosts"] = "hosts"
    mesh: str
    hosts: tuple[Host, ...] = ()
    error: Reason | None = None
    more: bool = False


class HostLost(_Model):
    """A host from an earlier HostsReply has exited. ``returns``: a replacement may follow."""

    type: Literal["host_lost"] = "host_lost"
    mesh: str
    host: str
    reason: Reason
    returns: bool = False


class HostRestored(_Model):
    """A host has replaced the lost one at ``rank``, possibly under another name."""

    type: Literal["host_back"] = "host_back"
    mesh: str
    rank: int
    host: Host


class Inspect(_Model):
    """Asks what the engine knows (``status``), or for the lines printed after number ``after`` (``output``)."""

    type: Literal["inspect"] = "inspect"
    request: int
    what: Literal["status", "output"]
    after: int = 0


class Notice(_Model):
    """A line about the job for the session's user, such as that its time limit is near."""

    type: Literal["notice"] = "notice"
    text: Reason


class EndSession(_Model):
    """The engine must stop the session's meshes, send SessionEnded and exit with status 0."""

    type: Literal["end"] = "end"
    reason: Reason


class ReportState(_Model):
    """Another server has taken over, which may have missed messages of the engine, as the engine may have missed parts
    of a reply. The engine repeats its pending requests and sends SessionState."""

    type: Literal["report_state"] = "report_state"


class DescribeSession(_Model):
    """Requests a SessionDescription."""

    type: Literal["describe"] = "describe"


# --- engine to server -------------------------------------------------------------------------------------


class EngineReady(_Model):
    """Monarch is loaded and the event loop runs."""

    type: Literal["ready"] = "ready"


class HostsRequest(_Model):
    """Requests the hosts of ``mesh``. The server answers with HostsReply."""

    type: Literal["ask_hosts"] = "ask_hosts"
    mesh: str


class Inspected(_Model):
    """A part of the answer to Inspect, JSON of an ``EngineStatus`` or a ``SessionOutput``. ``more``: others follow."""

    type: Literal["inspected"] = "inspected"
    request: int
    body: str
    more: bool = False


class ClientConnected(_Model):
    type: Literal["connected"] = "connected"


class ClientDisconnected(_Model):
    """``silence``: for how many seconds nothing had arrived when the connection ended. ``detached``: the session waits
    for another client however its connection ended."""

    type: Literal["disconnected"] = "disconnected"
    silence: float = 0.0
    detached: bool = False


class SessionState(_Model):
    """Whether a client is connected; otherwise for how many seconds none has been, and ``silence`` as above."""

    type: Literal["state"] = "state"
    connected: bool
    disconnected_for: float = 0.0
    silence: float = 0.0
    detached: bool = False


class ConnectionRefused(_Model):
    """The engine has answered a connection itself, because another client holds the session."""

    type: Literal["refused"] = "refused"


class SessionDescription(_Model):
    """Answers DescribeSession. ``facts`` is for the list of sessions."""

    type: Literal["description"] = "description"
    facts: dict[str, Any]


class SessionEnded(_Model):
    """The session ended in order: its meshes are stopped and the engine exits next."""

    type: Literal["ended"] = "ended"
    reason: Reason


ControlMessage: TypeAlias = (
    AssignSession
    | NewConnection
    | RunEnded
    | HostsReply
    | HostLost
    | HostRestored
    | Inspect
    | Notice
    | EndSession
    | ReportState
    | DescribeSession
    | EngineCounts
    | EngineReady
    | HostsRequest
    | Inspected
    | ClientConnected
    | ClientDisconnected
    | SessionState
    | ConnectionRefused
    | SessionDescription
    | SessionEnded
)
_messages: TypeAdapter[ControlMessage] = TypeAdapter(Annotated[ControlMessage, Field(discriminator="type")])


def parse_message(data: bytes) -> ControlMessage:
    """Raises ``pydantic.ValidationError`` (a ValueError) for an invalid message."""
    return _messages.validate_json(data)
