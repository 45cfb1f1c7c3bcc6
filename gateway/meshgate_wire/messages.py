"""The messages of protocol version 1: what each side may say, and nothing about how it travels.

A message is a header, one of the pydantic models below, with zero or more raw buffers beside it. Headers are
validated where bytes come in; buffers are never looked into by this package. ``docs/protocol.md`` tells the
same in prose and when each message is sent.

The client names every object it creates (positive numbers, never reused in a session), so that a message may
refer to an object whose creation is still on its way. Objects that first exist on the gateway's side (a mesh
that an endpoint returned) get negative numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import attrgetter
from typing import Annotated, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

__all__ = ["SYNC_STREAM", "Header", "dump_header", "load_header", "numbered", "stream_of"]

Label: TypeAlias = Annotated[str, Field(max_length=256)]
Path: TypeAlias = Annotated[str, Field(max_length=4096)]
Text: TypeAlias = Annotated[str, Field(max_length=262_144)]
MOST_COUNT = 2**53
Count: TypeAlias = Annotated[int, Field(ge=0, le=MOST_COUNT)]
ObjectId: TypeAlias = Annotated[int, Field(ge=-(2**53), le=2**53)]  # 0 names nothing
MAX_DIMENSIONS = 64

# What a peer can make as long as a header: the first bad element ends the reading of it.
Ranks: TypeAlias = Annotated[tuple[Count, ...], Field(fail_fast=True)]
Paths: TypeAlias = Annotated[tuple[Path, ...], Field(fail_fast=True)]
ObjectIds: TypeAlias = Annotated[tuple[ObjectId, ...], Field(fail_fast=True)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Region(_Model):
    """A hyper-rectangle of ranks: for each dimension a label, a size and a stride, from ``offset`` on."""

    labels: tuple[Label, ...] = Field(max_length=MAX_DIMENSIONS)
    offset: Count
    sizes: tuple[Count, ...] = Field(max_length=MAX_DIMENSIONS)
    strides: tuple[Count, ...] = Field(max_length=MAX_DIMENSIONS)

    @model_validator(mode="after")
    def _has_one_size_and_stride_a_label(self) -> Region:
        if not len(self.labels) == len(self.sizes) == len(self.strides):
            raise ValueError("a region has as many sizes and strides as labels")
        return self

    def __eq__(self, other: object) -> bool:  # as pydantic's, at a fifth of the time: every call compares regions
        return type(other) is Region and _facts(self) == _facts(other)

    def __hash__(self) -> int:
        return hash(_facts(self))


_facts = attrgetter("labels", "offset", "sizes", "strides")


class MeshRef(_Model):
    """A mesh, or with ``region`` a part of it."""

    object: ObjectId
    region: Region | None = None


class Argument(_Model):
    """What stands behind persistent id ``n`` (its index) in a pickled argument: an object of the session."""

    kind: Literal["hosts", "procs", "actors", "port"]
    ref: MeshRef


Arguments: TypeAlias = Annotated[tuple[Argument, ...], Field(fail_fast=True)]


# --- client to gateway ------------------------------------------------------------------------------------


class AttachHosts(_Model):
    """Names the hosts of mesh ``mesh`` of the job. Answered by HostsAttached or ObjectFailed."""

    type: Literal["attach_hosts"] = "attach_hosts"
    object: ObjectId
    mesh: Label


class SpawnProcs(_Model):
    """``hosts.spawn_procs(per_host, bootstrap, name)``. Buffers: the pickled bootstrap callable, if any."""

    type: Literal["spawn_procs"] = "spawn_procs"
    object: ObjectId
    hosts: MeshRef
    per_host: dict[Label, Annotated[int, Field(ge=1, le=65_536)]] = Field(max_length=MAX_DIMENSIONS)
    name: Label
    version: Label | None = None  # digest of the code snapshot the processes must run; None: any
    paths: Paths = ()  # relative to the snapshot: what comes first on sys.path


class SpawnActors(_Model):
    """``procs.spawn(name, Class, *args, **kwargs)``.

    Buffers: the pickled class, the pickled ``(args, kwargs)``, then the out-of-band buffers of the latter.
    """

    type: Literal["spawn_actors"] = "spawn_actors"
    object: ObjectId
    procs: MeshRef
    name: Label
    class_name: Annotated[str, Field(max_length=1024)]  # module.qualname, for people
    kind: Literal["sync", "async"]
    arguments: Arguments = ()
    version: Label | None = None
    paths: Paths = ()


class Call(_Model):
    """Calls an endpoint. Buffers: the pickled ``(args, kwargs)``, then its out-of-band buffers.

    Answered by Values (``call``, ``call_one``, ``choose``), by one Item a rank (``stream``), not at all
    (``broadcast``), or by Failed.
    """

    type: Literal["call"] = "call"
    call: Count
    target: MeshRef
    endpoint: Label
    adverb: Literal["call", "call_one", "choose", "stream", "broadcast"]
    explicit_port: bool = False  # the endpoint was declared with explicit_response_port=True
    arguments: Arguments = ()


class SendTo(_Model):
    """``monarch.actor.send(endpoint, args, kwargs, port)``: a call whose answers go to a channel's port."""

    type: Literal["send_to"] = "send_to"
    target: MeshRef
    endpoint: Label
    selection: Literal["all", "choose"] = "all"
    explicit_port: bool = False
    port: ObjectId
    arguments: Arguments = ()


class Sync(_Model):
    """A message of the sync of code (``docs/sync.md``), which has a vocabulary of its own, in ``body``. Both ways."""

    type: Literal["sync"] = "sync"
    body: Annotated[str, Field(max_length=262_144)]


class Reload(_Model):
    """``procs.reload()``: brings running processes to a version. Answered by Values (a report a process) or Failed."""

    type: Literal["reload"] = "reload"
    call: Count
    target: MeshRef
    version: Label
    paths: Paths = ()


class Stop(_Model):
    """Stops a host, proc or actor mesh, for good (``shutdown``: host processes too). Answered by Done or Failed."""

    type: Literal["stop"] = "stop"
    call: Count
    target: MeshRef
    reason: Text = "stopped by client"
    shutdown: bool = False


class Initialized(_Model):
    """Asks for the moment a mesh is up; with ``whole``, hosts that have ended are waited for. Answered by Done or
    Failed."""

    type: Literal["initialized"] = "initialized"
    call: Count
    target: MeshRef
    whole: bool = False


class OpenChannel(_Model):
    """Opens a channel; its port is object ``object``, its messages come as PortMessage."""

    type: Literal["open_channel"] = "open_channel"
    object: ObjectId
    once: bool = False


class PortSend(_Model):
    """``port.send(value)`` on the laptop. Buffers: the pickled value, then its out-of-band buffers."""

    type: Literal["port_send"] = "port_send"
    port: ObjectId
    arguments: Arguments = ()


class Adopt(_Model):
    """Tells what a negative object is, as the laptop learned by unpickling it.

    Buffers: the pickled class, for actors.
    """

    type: Literal["adopt"] = "adopt"
    object: ObjectId
    kind: Literal["hosts", "procs", "actors", "port"]
    name: Label = ""
    region: Region | None = None
    root: Region | None = None
    parent: MeshRef | None = None  # the proc mesh of actors, the host mesh of procs
    address: Annotated[str, Field(max_length=4096)] = ""  # of a port


class Release(_Model):
    """The laptop holds these objects (channels, negative objects) no longer."""

    type: Literal["release"] = "release"
    objects: ObjectIds


class Configure(_Model):
    """Session-wide settings; the last one counts."""

    type: Literal["configure"] = "configure"
    stream_output: bool = True


class EndSession(_Model):
    """The client is done for good: reap at once rather than after the lease. Answered by Done."""

    type: Literal["end_session"] = "end_session"
    call: Count


# --- gateway to client ------------------------------------------------------------------------------------


class Host(_Model):
    name: Label  # the pod's name; for a local process its own, such as "workers-0"
    address: Annotated[str, Field(max_length=4096)] = ""
    node: Label = ""  # of a pod: where it runs, and in which zone, as far as that is known
    zone: Label = ""


class HostsAttached(_Model):
    type: Literal["hosts_attached"] = "hosts_attached"
    object: ObjectId
    hosts: Annotated[tuple[Host, ...], Field(fail_fast=True)]


class Adopted(_Model):
    """Objects that a pickled value pops, in the order it pops them (its mesh references)."""

    objects: ObjectIds = ()


class Values(_Model):
    """The values of a call, one buffer a rank, in rank order of the target. ``objects[i]`` belongs to buffer i."""

    type: Literal["values"] = "values"
    call: Count
    ranks: Ranks | None = None  # which rank answered, for choose
    objects: dict[Count, Adopted] = {}


class Item(_Model):
    """One answer of a stream. Buffers: the pickled value."""

    type: Literal["item"] = "item"
    call: Count
    rank: Count
    objects: Adopted = Adopted()


class Done(_Model):
    type: Literal["done"] = "done"
    call: Count


class ErrorGroup(_Model):
    """The ranks whose failures were the same bytes. ``buffer``: index of the pickled ActorError; None, in the last
    group alone, of all ranks whose errors are too many different ones to be sent."""

    ranks: Ranks  # the first ranks, at most 64
    count: Count  # of all
    buffer: Count | None = None


class Failure(_Model):
    """Why a call or a creation failed.

    ``actor``: endpoints raised; ``errors`` groups them. ``supervision``: an actor, process or host died;
    ``ranks`` names the dead. ``step``: an earlier step that this one depends on failed; ``step`` names it and
    ``message`` is its reason. ``invalid``: the gateway refuses the request. ``stale_code``: a host has not got
    the code. ``internal``: the gateway is at fault.
    """

    kind: Literal["actor", "supervision", "step", "invalid", "stale_code", "internal"]
    message: Text
    step: Text = ""
    mesh: Label = ""
    ranks: Ranks = ()
    hosts: dict[Count, Label] = {}  # rank in the target to host name, for the ranks named here
    errors: Annotated[tuple[ErrorGroup, ...], Field(fail_fast=True)] = ()
    total: Count = 0  # ranks asked
    unanswered: Count = 0  # ranks that had not answered when the failure was told


class Failed(_Model):
    """A call failed. Buffers: the distinct pickled ActorErrors."""

    type: Literal["failed"] = "failed"
    call: Count
    rank: Count | None = None  # the one rank of a stream's item
    failure: Failure


class ObjectFailed(_Model):
    """The creation of an object failed; so will all that depends on it."""

    type: Literal["object_failed"] = "object_failed"
    object: ObjectId
    failure: Failure


class Fault(_Model):
    """A supervision event of a mesh of this session, for ``unhandled_fault_hook``."""

    type: Literal["fault"] = "fault"
    object: ObjectId | None
    mesh: Label
    ranks: Ranks
    hosts: dict[Count, Label] = {}
    report: Text


class OutputLine(_Model):
    """One line that an actor printed, its line end (``\\n`` or ``\\r``) kept in ``end``."""

    stream: Literal["stdout", "stderr"]
    mesh: Label = ""
    ranks: Ranks = ()  # the first ranks that printed it, at most 64
    count: Count = 1
    host: Label = ""
    text: Text
    end: Literal["\n", "\r", ""] = "\n"


class Output(_Model):
    type: Literal["output"] = "output"
    lines: Annotated[tuple[OutputLine, ...], Field(fail_fast=True)]


class PortMessage(_Model):
    """A message that reached a channel. Buffers: the pickled value (``exception``: the pickled ActorError)."""

    type: Literal["port_message"] = "port_message"
    port: ObjectId
    rank: Count | None = None
    exception: bool = False
    objects: Adopted = Adopted()


Header: TypeAlias = Annotated[
    AttachHosts
    | SpawnProcs
    | SpawnActors
    | Call
    | SendTo
    | Sync
    | Reload
    | Stop
    | Initialized
    | OpenChannel
    | PortSend
    | Adopt
    | Release
    | Configure
    | EndSession
    | HostsAttached
    | Values
    | Item
    | Done
    | Failed
    | ObjectFailed
    | Fault
    | Output
    | PortMessage,
    Field(discriminator="type"),
]

_HEADER: TypeAdapter[Header] = TypeAdapter(Header)
_LOAD: Callable[[bytes], Header] = _HEADER.validator.validate_json
_NUMBERED = re.compile(rb'\{"type":"[a-z_]{1,32}","call":(0|[1-9][0-9]{0,15})(?=[,}])')
_PARSED_KEPT = 512
_PARSED_BYTES = 1024
_parsed: dict[bytes, Header] = {}  # by their JSON without the number
_set = object.__setattr__  # past the models' being frozen
H = TypeVar("H", bound=_Model)


def dump_header(header: Header) -> bytes:
    """The JSON of ``header``. Raises ``ValueError`` for text that UTF-8 cannot express (lone surrogates)."""
    return header.__pydantic_serializer__.to_json(header)  # a third of what the union's serializer takes


def load_header(data: bytes | memoryview) -> Header:
    """The header in ``data``. Raises ``pydantic.ValidationError`` on anything that is not one."""
    if not isinstance(data, bytes):
        data = bytes(data)
    found = _NUMBERED.match(data)
    if found is None or (call := int(found[1])) > MOST_COUNT:
        return _LOAD(data)
    # Calls of an endpoint, and their answers, differ in the number alone: the rest is parsed once.
    rest = data[: found.start(1)] + data[found.end(1) :]
    known = _parsed.get(rest)
    if known is not None:
        return numbered(known, call)
    header = _LOAD(data)
    if len(rest) <= _PARSED_BYTES:
        if len(_parsed) >= _PARSED_KEPT:
            _parsed.clear()
        _parsed[rest] = header
    return header


def numbered(header: H, call: int) -> H:
    """``header`` for call number ``call``: a copy, at a fraction of what making and checking one takes."""
    new = object.__new__(type(header))
    _set(new, "__dict__", {**header.__dict__, "call": call})
    _set(new, "__pydantic_fields_set__", header.__pydantic_fields_set__)
    _set(new, "__pydantic_extra__", None)
    _set(new, "__pydantic_private__", None)
    return new


SYNC_STREAM = 2**31 - 1
"""The stream of all messages about code; no object's number gets there."""


def stream_of(number: int) -> int:
    """The stream of an object's messages: its number, or past 2**31 for those that the gateway numbered."""
    return number if number >= 0 else 2**31 - number
