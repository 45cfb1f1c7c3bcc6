"""The messages of protocol version 3.

A message is a header, one of the pydantic models below, and zero or more raw buffers. Headers are validated on receipt;
this package never inspects buffers. ``docs/protocol.md`` describes each message and when it is sent.

The client numbers every object that it creates (positive numbers, never reused in a session), so that a message can
refer to an object before its creation is acknowledged. Objects that the gateway creates, such as a mesh that an
endpoint returned, have negative numbers.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from .models.detached import (
    Attached,
    Detach,
    EndpointSignature,
    Fetch,
    Keeps,
    KeptCall,
    KeptCalls,
    Parameter,
    Read,
    Resume,
)
from .models.fields import (
    MAX_COUNT,
    MAX_DIMENSIONS,
    MAX_SPANS,
    Count,
    Host,
    HostNames,
    Label,
    Line,
    MeshRef,
    Model,
    ObjectId,
    ObjectIds,
    Path,
    Paths,
    Ranks,
    Region,
    Text,
)
from .models.from_gateway import (
    Adopted,
    CallProgress,
    Done,
    ErrorGroup,
    Failed,
    Failure,
    Fault,
    HostEnding,
    HostsAttached,
    Item,
    ObjectFailed,
    Output,
    OutputLine,
    PortMessage,
    Progress,
    Values,
    waiting_ranks,
)

__all__ = [
    "MAX_COUNT",
    "MAX_DIMENSIONS",
    "MAX_PER_HOST",
    "MAX_SPANS",
    "SYNC_STREAM",
    "Adopted",
    "Attached",
    "CallProgress",
    "Count",
    "Detach",
    "Done",
    "EndpointSignature",
    "ErrorGroup",
    "Failed",
    "Failure",
    "Fault",
    "Fetch",
    "Header",
    "Host",
    "HostEnding",
    "HostNames",
    "HostsAttached",
    "Item",
    "Keeps",
    "KeptCall",
    "KeptCalls",
    "MeshRef",
    "ObjectFailed",
    "Output",
    "OutputLine",
    "Parameter",
    "Path",
    "PortMessage",
    "Progress",
    "Read",
    "Region",
    "Resume",
    "Text",
    "Values",
    "stream_of",
    "waiting_ranks",
]

MAX_PER_HOST = 65_536  # processes in one dimension


class Argument(Model):
    """The object that a persistent id in a pickled argument stands for; its index is the id."""

    kind: Literal["hosts", "procs", "actors", "port", "kept"]
    ref: MeshRef
    whole: bool = False  # of a kept mesh: every rank gets all its values, not the value of its own rank


Arguments: TypeAlias = Annotated[tuple[Argument, ...], Field(fail_fast=True)]


class BootstrapCommand(Model):
    """The command that starts a process. Without ``program``, the host's Python; without ``args``, those of Monarch."""

    program: Path | None = None
    arg0: Path | None = None
    args: Annotated[tuple[Line, ...], Field(fail_fast=True)] | None = None
    env: dict[Label, Line | None] = Field(default_factory=dict)  # None removes a variable
    inherit_env: bool = True


class Launch(Model):
    """How processes are started. ``binding``: the CPUs of each process of a host. ``command_of``: for each rank, the
    index of its command; empty if all use the first."""

    binding: Annotated[tuple[dict[Label, Label], ...], Field(fail_fast=True)] = ()
    commands: Annotated[tuple[BootstrapCommand, ...], Field(fail_fast=True)] = ()
    command_of: Ranks = ()

    @model_validator(mode="after")
    def _check_indexes(self) -> Launch:
        if self.command_of and max(self.command_of) >= len(self.commands):
            raise ValueError("a rank's command is missing")
        return self


# --- client to gateway ------------------------------------------------------------------------------------


class AttachHosts(Model):
    """Makes the hosts of the job's mesh ``mesh`` an object. Reply: HostsAttached or ObjectFailed."""

    type: Literal["attach_hosts"] = "attach_hosts"
    object: ObjectId
    mesh: Label


class SpawnProcs(Model):
    """``hosts.spawn_procs(per_host, bootstrap, name)``. Buffers: the pickled bootstrap callable, if any."""

    type: Literal["spawn_procs"] = "spawn_procs"
    object: ObjectId
    hosts: MeshRef
    per_host: dict[Label, Annotated[int, Field(ge=1, le=MAX_PER_HOST)]] = Field(max_length=MAX_DIMENSIONS)
    name: Label
    launch: Launch | None = None  # None: as the hosts start processes by default
    version: Label | None = None  # digest of the code snapshot that the processes must run; None: any
    paths: Paths = ()  # relative to the snapshot; prepended to sys.path


class SpawnActors(Model):
    """``procs.spawn(name, Class, *args, **kwargs)``.

    Buffers: the pickled class, the pickled ``(args, kwargs)``, then the out-of-band buffers of the latter.
    """

    type: Literal["spawn_actors"] = "spawn_actors"
    object: ObjectId
    procs: MeshRef
    name: Label
    class_name: Annotated[str, Field(max_length=1024)]  # module.qualname, for error messages
    kind: Literal["sync", "async"]
    arguments: Arguments = ()
    version: Label | None = None
    paths: Paths = ()
    endpoints: Annotated[tuple[EndpointSignature, ...], Field(fail_fast=True)] = ()  # for a later holder's proxies


class GetControllers(Model):
    """``get_or_spawn_controller(...)`` on the driver: ``object`` becomes the actor that keeps the controllers.

    It waits until the mesh ``hosts`` is attached, or has failed.
    """

    type: Literal["get_controllers"] = "get_controllers"
    object: ObjectId
    hosts: ObjectId = 0
    version: Label | None = None
    paths: Paths = ()


class Call(Model):
    """Calls an endpoint. Buffers: the pickled ``(args, kwargs)``, then its out-of-band buffers.

    Reply: Values (``call``, ``call_one``, ``choose``), one Item for each rank (``stream``), none (``broadcast``), or
    Failed.
    """

    type: Literal["call"] = "call"
    call: Count
    target: MeshRef
    endpoint: Label
    adverb: Literal["call", "call_one", "choose", "stream", "broadcast"]
    explicit_port: bool = False  # the endpoint was declared with explicit_response_port=True
    arguments: Arguments = ()
    tag: Label = ""  # of the program, for a later holder of the session
    trace: dict[Label, Line] = Field(default={}, max_length=16)  # the caller's span, as its propagator writes it
    keep: ObjectId = 0  # of ``call``: the results stay in their processes and become this object


class Returned(Model):
    """A reply that the gateway had sent before it received Detach: the session keeps it for the next holder.

    Buffers: those of the reply. ``request`` is without its arguments. ``given``: how many results the call, a stream,
    had given before the first that is sent back.
    """

    type: Literal["returned"] = "returned"
    request: Call
    reply: Annotated[Values | Item | Failed, Field(discriminator="type")]
    given: Count = 0


class CancelCall(Model):
    """``future.cancel()``. Sent on the stream of the call, so it comes after it. Reply: none; the call fails with kind
    ``cancelled``, unless it has been answered. Async endpoints are cancelled where they run, and not begun where they
    wait; others run to their end.
    """

    type: Literal["cancel_call"] = "cancel_call"
    cancelled: Count = Field(description="the number of an earlier Call")


class PutValue(Model):
    """``mesh.put(value)``: one value stays in each process of a proc or actor mesh, and they become ``keep``.

    Buffers: the pickled ``((keep, label, value), {})``, then its out-of-band buffers. Reply: as of a Call that keeps.
    """

    type: Literal["put_value"] = "put_value"
    call: Count
    target: MeshRef
    keep: ObjectId
    arguments: Arguments = ()


class ReadKept(Model):
    """``kept.get()``. Reply: Values with the values of a kept mesh, or Failed."""

    type: Literal["read_kept"] = "read_kept"
    call: Count
    target: MeshRef
    describe: bool = False  # the values are described, as in the reply to a Call that keeps


class NameKept(Model):
    """``kept.named(name)``: later holders get ``region`` of the values ``kept``, which stay as long as the session."""

    type: Literal["name_kept"] = "name_kept"
    kept: ObjectId
    name: Label
    label: Text  # the call that they are the results of
    procs: ObjectId  # in which they stay
    region: Region


class SendTo(Model):
    """``monarch.actor.send(endpoint, args, kwargs, port)``: a call whose replies go to a channel's port."""

    type: Literal["send_to"] = "send_to"
    target: MeshRef
    endpoint: Label
    selection: Literal["all", "choose"] = "all"
    explicit_port: bool = False
    port: ObjectId
    arguments: Arguments = ()


class Sync(Model):
    """A message of the code sync (``docs/sync.md``), in either direction. ``body`` has a format of its own."""

    type: Literal["sync"] = "sync"
    body: Annotated[str, Field(max_length=262_144)]


class Reload(Model):
    """``procs.reload()``: updates running processes to a version. Reply: Values (one report per process) or Failed."""

    type: Literal["reload"] = "reload"
    call: Count
    target: MeshRef
    version: Label
    paths: Paths = ()


class Stop(Model):
    """Stops a host, proc or actor mesh (with ``shutdown``, host processes too). Reply: Done or Failed."""

    type: Literal["stop"] = "stop"
    call: Count
    target: MeshRef
    reason: Text = "stopped by client"
    shutdown: bool = False


class Initialized(Model):
    """Waits until a mesh is up; with ``whole``, also until its lost hosts are back. Reply: Done or Failed."""

    type: Literal["initialized"] = "initialized"
    call: Count
    target: MeshRef
    whole: bool = False


class OpenChannel(Model):
    """Opens a channel, whose port is ``object`` and whose messages arrive as PortMessage."""

    type: Literal["open_channel"] = "open_channel"
    object: ObjectId
    once: bool = False
    name: Label = ""  # for a later holder of the session


class PortSend(Model):
    """``port.send(value)`` on the laptop. Buffers: the pickled value, then its out-of-band buffers."""

    type: Literal["port_send"] = "port_send"
    port: ObjectId
    arguments: Arguments = ()
    return_undeliverable: bool = True  # False: drop the value if it cannot be delivered, rather than report a fault


class Adopt(Model):
    """Describes a mesh or port, as the laptop found it by unpickling: a negative object or, with ``has_reference``, a
    new one. Buffers: for actors, the pickled class; then Monarch's reference to the mesh, if there is one."""

    type: Literal["adopt"] = "adopt"
    object: ObjectId
    kind: Literal["hosts", "procs", "actors", "port"]
    name: Label = ""
    region: Region | None = None
    root: Region | None = None
    parent: MeshRef | None = None  # the proc mesh of actors, the host mesh of procs
    address: Annotated[str, Field(max_length=4096)] = ""  # of a port
    has_reference: bool = False


class Release(Model):
    """The laptop no longer uses these objects (channels, kept meshes, negative objects).

    They are released with the last of ``parts`` such messages, one on each stream that had messages which name them.
    """

    type: Literal["release"] = "release"
    objects: ObjectIds
    parts: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 1


class Configure(Model):
    """Settings of the session; the last message applies."""

    type: Literal["configure"] = "configure"
    stream_output: bool = True


class ConfigureMonarch(Model):
    """All of Monarch's settings that the program has changed; others return to the engine's own values.

    Reply: Values with the pickled settings in effect, by name, as booleans, numbers and strings; or Failed.
    """

    type: Literal["configure_monarch"] = "configure_monarch"
    call: Count
    settings: dict[Label, bool | int | float | Line | None] = Field(default={}, max_length=1024)


class CollectTelemetry(Model):
    """Collects Monarch's telemetry from now on, and keeps messages and traces for ``retention`` seconds; 0: always.

    Hosts are sampled every ``host_metrics_interval`` seconds and GPUs every ``gpu_metrics_interval``; 0: never. Before
    0.8, Monarch samples neither. Reply: Done.
    """

    type: Literal["collect_telemetry"] = "collect_telemetry"
    call: Count
    retention: Count
    host_metrics_interval: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    gpu_metrics_interval: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class TelemetryRequest(Model):
    """A request to Monarch's dashboard. Buffers: the JSON of a POST, or none.

    Reply: Values with a pickled tuple: status, content type, body.
    """

    type: Literal["telemetry_request"] = "telemetry_request"
    call: Count
    path: Annotated[str, Field(max_length=65536)]  # with the query


class EndSession(Model):
    """Ends the session now rather than when its lease expires. Reply: Done."""

    type: Literal["end_session"] = "end_session"
    call: Count


Header: TypeAlias = Annotated[
    AttachHosts
    | SpawnProcs
    | SpawnActors
    | GetControllers
    | Call
    | CancelCall
    | PutValue
    | ReadKept
    | NameKept
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
    | ConfigureMonarch
    | CollectTelemetry
    | TelemetryRequest
    | EndSession
    | Detach
    | Read
    | Resume
    | Fetch
    | Returned
    | HostsAttached
    | HostEnding
    | Values
    | Item
    | Done
    | Progress
    | Failed
    | ObjectFailed
    | Fault
    | Output
    | PortMessage
    | Keeps
    | KeptCalls
    | Attached,
    Field(discriminator="type"),
]

SYNC_STREAM = 2**31 - 1
"""The stream of all messages about code; object numbers stay below it."""


def stream_of(number: int) -> int:
    """The stream of an object's messages: its number, or a number above 2**31 for objects of the gateway."""
    return number if number >= 0 else 2**31 - number
