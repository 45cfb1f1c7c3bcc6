"""The messages of protocol version 3.

A message is a header, one of the pydantic models below, and zero or more raw buffers. Headers are validated on receipt;
this package never inspects buffers. ``docs/protocol.md`` describes each message and when it is sent.

The client numbers every object that it creates (positive numbers, never reused in a session), so that a message can
refer to an object before its creation is acknowledged. Objects that the gateway creates, such as a mesh that an
endpoint returned, have negative numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from .fields import (
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
    Spans,
    Text,
)

__all__ = [  # of ``fields``; importers find the names of this module without it
    "MAX_COUNT",
    "MAX_DIMENSIONS",
    "MAX_SPANS",
    "Count",
    "Host",
    "HostNames",
    "MeshRef",
    "Path",
    "Region",
    "Text",
]

MAX_PER_HOST = 65_536  # processes in one dimension


class Argument(Model):
    """The object that a persistent id in a pickled argument stands for; its index is the id."""

    kind: Literal["hosts", "procs", "actors", "port", "kept"]
    ref: MeshRef
    whole: bool = False  # of a kept mesh: every rank gets all its values, not the value of its own rank
    reference: bool = False  # of a kept mesh: ranks get references in place of the values


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


class Parameter(Model):
    """A parameter of an endpoint. ``kind`` is as in ``inspect.Parameter``; ``default`` and ``annotation`` are text."""

    name: Label
    kind: Annotated[int, Field(ge=0, le=4)]
    default: Label | None = None
    annotation: Label | None = None


class EndpointSignature(Model):
    """An endpoint as its callers see it."""

    name: Label
    parameters: Annotated[tuple[Parameter, ...], Field(fail_fast=True)]
    explicit_port: bool = False
    is_async: bool = False
    placeholders: Annotated[int, Field(ge=0, le=2)] = 1  # leading parameters that callers do not pass


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

    Buffers: the pickled ``((keep, label), {"value": value})``, then its out-of-band buffers. Reply: as of a Call that
    keeps.
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
    Kept values that actors have references to stay, unless they are to go ``at_once``.
    """

    type: Literal["release"] = "release"
    objects: ObjectIds
    parts: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 1
    at_once: bool = False


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


# --- detached sessions, which keep running when their holder leaves ---------------------------------------
#
# ``docs/sessions.md`` describes what such a session keeps. A new holder first receives the messages that created the
# session's objects, as their creator sent them, then what became of them, the calls that are kept, and ``Attached``.

CallNumbers: TypeAlias = Annotated[tuple[Count, ...], Field(fail_fast=True)]


class Detach(Model):
    """From now on the session keeps what its holder has not read, and another client may take it over. Reply: Keeps,
    then Done."""

    type: Literal["detach"] = "detach"
    call: Count
    name: Label


class Read(Model):
    """What the holder has read since its last ``Read``, so that the gateway need not keep it.

    ``released``: calls whose results the program dropped unread. ``ports``, ``output`` and ``faults`` are the numbers
    of the last message of each channel that was taken, the last line that was printed, and the last fault that was
    reported.
    """

    type: Literal["read"] = "read"
    calls: CallNumbers = ()
    released: CallNumbers = ()
    ports: dict[ObjectId, Count] = Field(default={})
    output: Count | None = None
    faults: Count | None = None


class Resume(Model):
    """A new holder is ready for output and channels. ``replay``: output from the first line that is kept."""

    type: Literal["resume"] = "resume"
    replay: bool = False


class Fetch(Model):
    """A new holder waits for the results of these calls of an earlier one."""

    type: Literal["fetch"] = "fetch"
    calls: CallNumbers


class Keeps(Model):
    """Calls that the holder made before it sent Detach and that are answered after it, so that their replies are kept.
    Of other calls the reply is on its way, and the holder sends it back."""

    type: Literal["keeps"] = "keeps"
    calls: CallNumbers


class KeptCall(Model):
    """A call of an earlier holder.

    ``state``: it is running, its result has not been read, its result was read and is still kept, or its result is no
    longer kept (``lost``), for the reason in ``reason``.
    """

    call: Count
    target: MeshRef
    endpoint: Label
    adverb: Literal["call", "call_one", "choose", "stream"]
    tag: Label = ""
    age: Annotated[float, Field(ge=0, allow_inf_nan=False)]  # seconds since the gateway received it
    state: Literal["in flight", "finished", "read", "lost"]
    reason: Label = ""


class KeptCalls(Model):
    type: Literal["kept_calls"] = "kept_calls"
    calls: Annotated[tuple[KeptCall, ...], Field(fail_fast=True)]


class Attached(Model):
    """The last message of what a new holder receives first.

    ``next_object`` and ``next_call`` are numbers that no earlier holder has used. ``never_received``: calls that an
    earlier holder had posted and the gateway never received, as far as it can know.
    """

    type: Literal["attached"] = "attached"
    name: Label
    takeovers: Count
    next_object: Count
    next_call: Count
    never_received: Count = 0
    code_version: Label | None = None
    code_paths: Paths = ()
    previous_holder: Line = ""
    lines_dropped: Count = 0  # at the start of the output, which are no longer kept
    unread_lines: Count = 0


# --- gateway to client ------------------------------------------------------------------------------------


class HostsAttached(Model):
    type: Literal["hosts_attached"] = "hosts_attached"
    object: ObjectId
    hosts: Annotated[tuple[Host, ...], Field(fail_fast=True)]


class HostEnding(Model):
    """The cluster is going to end a host of mesh ``object``. HostsAttached follows once another has its place, or
    if the cluster is not going to end it any more."""

    type: Literal["host_ending"] = "host_ending"
    object: ObjectId
    host: Label
    reason: Text
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]  # that are left


class Adopted(Model):
    """The meshes in a pickled value, in the order in which they are unpickled."""

    objects: ObjectIds = ()


class Values(Model):
    """The values of a call, one buffer for each rank, in rank order. ``objects[i]`` belongs to buffer i."""

    type: Literal["values"] = "values"
    call: Count
    ranks: Ranks | None = None  # for choose: the rank that replied
    objects: dict[Count, Adopted] = Field(default={})


class Item(Model):
    """One reply of a stream. Buffers: the pickled value."""

    type: Literal["item"] = "item"
    call: Count
    rank: Count
    objects: Adopted = Adopted()


class Done(Model):
    type: Literal["done"] = "done"
    call: Count


class ErrorGroup(Model):
    """The ranks whose pickled exceptions were identical.

    ``buffer``: the index of the pickled exception. None, in the last group only, for all ranks whose exceptions were
    not sent, since there were too many distinct ones.
    """

    ranks: Ranks  # the first ones, at most 64
    count: Count  # of all ranks in the group
    buffer: Count | None = None


class Failure(Model):
    """Why a call or a creation failed.

    ``actor``: endpoints raised exceptions, grouped in ``errors``, or the bootstrap of a process did, and ``message`` is
    its traceback. ``supervision``: an actor, process or host died; ``ranks`` are those that died. ``step``: an earlier
    step failed that this one depends on; ``step`` names it and ``message`` is its error. ``lost``: the processes of
    ``ranks`` have ended, which kept values of the call ``step``. ``cancelled``: the program cancelled the call, which
    ``ranks`` had not answered. ``invalid``: the gateway rejected the request. ``stale_code``: a host could not get the
    code version. ``internal``: a bug in the gateway.

    With ``step``, another failure than these is that of an earlier call, whose result this one takes.
    """

    kind: Literal["actor", "supervision", "step", "lost", "cancelled", "invalid", "stale_code", "internal"]
    message: Text
    step: Text = ""
    mesh: Label = ""
    ranks: Ranks = ()
    hosts: HostNames = Field(default={})  # host name by rank, for the ranks in this failure
    errors: Annotated[tuple[ErrorGroup, ...], Field(fail_fast=True)] = ()
    total: Count = 0  # called ranks
    unanswered: Count = 0  # ranks that had not replied when the failure was sent

    def as_cause(self) -> Failure:
        """The failure of what needs an object that could not be created because of this one."""
        if self.kind == "step":
            return self
        return self.model_copy(update={"kind": "step", "step": self.step or self.mesh})

    @staticmethod
    def of_spawn(actors: str, class_name: str, message: str) -> Failure:
        """``actors`` could not be spawned."""
        return Failure(kind="supervision", message=message, step=f"spawn({actors!r}, {class_name})", mesh=actors)

    @staticmethod
    def of_spawn_on_dead(actors: str, class_name: str, procs: str, dead: Sequence[int], report: str) -> Failure:
        """``report`` is of the first of the ``dead`` ranks."""
        named = ", ".join(map(str, dead[:DEAD_NAMED])) + (" and others" if len(dead) > DEAD_NAMED else "")
        reason = f"no actors can be spawned on ranks {named} of {procs}: {report}"
        remedy = "Spawn on a slice of the living ranks, or spawn new processes"
        return Failure.of_spawn(actors, class_name, f"{reason}\n{remedy}")

    @staticmethod
    def of_stop(actors: str, dead: int, report: str) -> Failure:
        """``actors``, of which rank ``dead`` has died, could not be stopped."""
        message = (
            f"actors {actors!r} were not stopped, because rank {dead} has ended: {report}\n"
            "Monarch stops no actors of a mesh of which one has ended: the others go on until their processes are "
            "stopped, with stop() of the proc mesh"
        )
        return Failure(kind="supervision", message=message, mesh=actors)


class CallProgress(Model):
    """How far call ``call`` is: ``waiting`` are the hosts of the first ranks that have not replied, by rank."""

    call: Count
    total: Count
    answered: Count
    age: float = Field(ge=0, allow_inf_nan=False)  # seconds since it was sent to the actors
    waiting: HostNames = Field(default={})
    first: bool = True  # no earlier call to these actors is in flight
    untried: bool = False  # no call to these actors has ended yet, so their constructors may still run


RANKS_NAMED, DEAD_NAMED = 4, 8


def waiting_ranks(hosts: Mapping[int, str], missing: int) -> str:
    """``rank 1 on workers-0 and 2 others``, for people: of ``missing`` ranks, the first, which have these ``hosts``."""
    named = [f"rank {rank}" + (f" on {host}" if host else "") for rank, host in islice(hosts.items(), RANKS_NAMED)]
    return ", ".join(named) + (f" and {missing - len(named)} others" if missing > len(named) else "")


class Progress(Model):
    """The progress of calls that take long, sent when it has changed."""

    type: Literal["progress"] = "progress"
    calls: Annotated[tuple[CallProgress, ...], Field(fail_fast=True)]


class Failed(Model):
    """A call failed. Buffers: the distinct pickled exceptions."""

    type: Literal["failed"] = "failed"
    call: Count
    rank: Count | None = None  # for an item of a stream
    failure: Failure


class ObjectFailed(Model):
    """The creation of an object failed; whatever depends on it fails too."""

    type: Literal["object_failed"] = "object_failed"
    object: ObjectId
    failure: Failure


class Fault(Model):
    """A supervision event of a mesh of this session, for ``unhandled_fault_hook``."""

    type: Literal["fault"] = "fault"
    object: ObjectId | None
    mesh: Label
    ranks: Ranks
    hosts: HostNames = Field(default={})
    report: Text
    number: Count = 0  # in a detached session, from 1
    job_lost: bool = False  # the job has no host any more, and none follows


class OutputLine(Model):
    """One line that an actor printed; ``end`` is its line end."""

    stream: Literal["stdout", "stderr"]
    mesh: Label = ""
    procs: ObjectId = 0  # the mesh of the process, if it is one of the session
    ranks: Ranks = ()  # the first ones that printed it, at most 64
    more_ranks: Spans = ()  # the others
    count: Count = 1
    host: Label = ""
    text: Line
    end: Literal["\n", "\r", ""] = "\n"

    def every_rank(self) -> Iterator[int]:
        """The ranks that printed it, as far as they are named."""
        return chain(self.ranks, *(range(first, last + 1) for first, last in self.more_ranks))


class Output(Model):
    """Lines that actors printed. In a detached session ``first`` is the number of the first of them, from 1."""

    type: Literal["output"] = "output"
    first: Count = 0
    lines: Annotated[tuple[OutputLine, ...], Field(fail_fast=True)]


class PortMessage(Model):
    """A message to a channel. Buffers: the pickled value, or with ``exception`` the pickled exception."""

    type: Literal["port_message"] = "port_message"
    port: ObjectId
    rank: Count | None = None
    exception: bool = False
    objects: Adopted = Adopted()
    number: Count = 0  # of the message in its channel, in a detached session, from 1


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
