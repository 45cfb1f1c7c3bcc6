"""What the engine needs of Monarch, whatever its release, and the adapter that does it for the installed one.

Meshes, actor references, ports and receivers are Monarch's own objects and opaque to callers (``Any``). Except where
a method is a coroutine, it hands its work to Monarch and returns at once. Monarch reports errors as exceptions of its
own, some of which derive from BaseException alone; ``error_text`` and others read their texts, which the supported
releases word alike.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

from meshgate_gateway.engine.monarch.same_versions import SameVersions, version_problem
from meshgate_gateway.engine.monarch.telemetry import Collector
from meshgate_wire.messages import Host, Launch, Region

Fragments: TypeAlias = Sequence[bytes | memoryview]  # views only of memory that this process allocated
# Each supported release and its module, which defines ``Client``, an implementation of ``Monarch``.
SUPPORTED: Mapping[str, str] = {
    "0.7": "meshgate_gateway.engine.monarch.release_0_7",
    "0.8": "meshgate_gateway.engine.monarch.release_0_8",
}
# A worker of the gateway's release would take this message, with which attaching begins. Another forwards it to itself.
_REFUSED = re.compile(
    r"undeliverable message to host_agent\.\S*?@(\S+):\n.*::SetClientConfig\n.*delivery failure: ttl expired", re.DOTALL
)
_STOPPED = re.compile(r"has status:\s+stopped\b")
_SILENT = re.compile(r"(?:\{(?P<point>[^{}]*)\})?> has status:\s+stopped: no status received from process")
_SILENT_HINT = (
    ": the process has not answered for about half a minute. Its host may have lost its power or its network, or be "
    "stopped. Slices of the other hosts still work, and you can spawn on them again"
)
_KILLED = "Killed(sig=9)"
# The actor must be a child of the root: of an actor's own children, Monarch reports the same with the actor's rank.
_EXITED = re.compile(
    r"The actor <root>\.<(?:[^<>]|<locals>)*> and all its descendants have failed:\n"
    r" *the process this actor was running on (?:exited with non-zero code (\d+)|failed: Killed\(sig=(\d+))"
)
# Monarch 0.7, also without meshgate: if a call waits for a rank of which the process is killed, the other actors on
# its proc mesh are stopped as orphans after 117 to 121 s (HYPERACTOR_MESH_ORPHAN_TIMEOUT is 60 s; what a process sets
# later has no effect).
_ORPHANED = re.compile(r"has status:\n\s*stopped: orphaned")
_ORPHANED_HINT = (
    " (Monarch stops the actors that are left of a mesh that has lost a rank, within two minutes; their processes "
    "continue: spawn actors in a slice of them, or spawn new processes)"
)
_KILLED_HINT = " (if nothing sent the signal, the kernel did: the machine or the pod ran out of memory)"


@dataclass(frozen=True, slots=True)
class Fault:
    """A supervision event: ``ranks`` of ``mesh`` (its unique name) failed. No ranks means all of them."""

    mesh: str
    ranks: tuple[int, ...]
    report: str


class Reply(NamedTuple):
    """One actor's reply. ``data`` is a pickle, unopened; ``references`` are the meshes that it refers to. ``printed``:
    the positions in its output that come before it, if that may arrive later (``on_worker/output_marks.py``)."""

    rank: int | None
    exception: bool
    data: bytes | memoryview
    references: tuple[Any, ...]
    printed: tuple[int, int] | None = None


class BatchedReply(NamedTuple):
    """A reply to one call of a batch, by its position. None: Monarch itself has replied, to all that the rank has not.
    ``seconds``: the time that the call took there."""

    number: int | None
    seconds: float
    reply: Reply


class BootstrapFailed(Exception):
    """The bootstrap of a process raised an exception. The message is the traceback."""


OnFault: TypeAlias = Callable[[Fault], None]


class Readiness(Protocol):
    """Waiting until meshes are up."""

    async def wait_initialized(self, mesh: Any) -> None:
        """Waits until a host or proc mesh is up. Raises ``BootstrapFailed``, or what else kept it from coming up."""

    async def wait_actors_initialized(self, actors: Any) -> str:
        """Waits until the actors' constructors have run and returns the mesh's unique name, as in ``Fault.mesh``."""


class HostAttacher(Protocol):
    """Host meshes."""

    def attach(self, name: str, hosts: Sequence[Host]) -> Any:
        """Attaches to hosts, by identity if the release needs it, and returns their mesh.

        ``wait_initialized`` reports failures.
        """

    async def settings_applied(self) -> None:
        """Waits while settings are withheld because hosts are being attached to."""


class Slicer(Protocol):
    """Parts of meshes."""

    def slice_mesh(self, mesh: Any, region: Region) -> Any:
        """The part ``region`` of a host or proc mesh."""

    def slice_actors(self, actors: Any, region: Region) -> Any:
        """The part ``region`` of an actor mesh."""

    def with_python(self, hosts: Any, python: str) -> Any:
        """The same hosts, which start processes with the interpreter ``python``."""


class Spawner(Readiness, Protocol):
    """Meshes of the client's."""

    def spawn_procs(
        self, hosts: Any, per_host: Mapping[str, int], name: str, bootstrap: Any, launch: Launch | None = None
    ) -> Any:
        """Spawns a proc mesh. Each process runs ``bootstrap`` first."""

    def spawn_actors(
        self,
        procs: Any,
        name: str,
        class_name: str,
        kind: Literal["sync", "async"],
        class_data: Fragments,
        arguments: Any,
    ) -> Any:
        """Spawns actors of a pickled class that only the workers can import. ``arguments`` is a ``payload``."""


class EngineActors(Protocol):
    """Actors of the engine's own, and how the engine calls them."""

    def spawn_engine_actors(self, procs: Any, name: str, class_name: str, *args: Any) -> Any:
        """Spawns actors of a class of ``on_worker.code_actors``, which travels by value."""

    async def call_engine_actors(self, actors: Any, count: int, endpoint: str, *args: Any) -> list[Any]:
        """Calls actors of the engine's own and returns their ``count`` replies by rank. Raises the first exception."""

    def engine_payload(self, *args: Any, objects: Sequence[Any] = ()) -> Any:
        """The payload of a call with ``args`` that the engine itself makes. ``objects``: those of Monarch's in them."""

    def process_ids(self, procs: Any) -> tuple[str, ...]:
        """The ids of the processes of a mesh that is up, in the order of ranks; they are the same in every mesh."""


class Stopper(Readiness, Protocol):
    """The end of meshes."""

    async def stop_actors(self, actors: Any, reason: str) -> None: ...

    async def stop_procs(self, procs: Any, reason: str) -> None: ...

    async def stop_hosts(self, hosts: Any) -> None:
        """Stops what runs on the hosts. Their processes stay and can be attached to again."""

    async def shut_down_hosts(self, hosts: Any) -> None:
        """Ends the host processes."""


class Payloads(Protocol):
    """What the client has pickled."""

    def payload(self, data: Fragments, buffers: Sequence[Fragments] = (), objects: Sequence[Any] = ()) -> Any:
        """The value that the pickle ``data`` holds, for ``cast``, ``spawn_actors`` and ``send_to_port``.

        ``buffers`` are its out-of-band buffers; ``objects`` replace its persistent ids.
        """

    def payload_at(self, payload: Any, position: int, region: Region) -> Any:
        """``payload`` for one actor, whose message rank is ``position`` of ``region`` while it handles the message."""

    def payload_with_trace(self, payload: Any, trace: Mapping[str, str]) -> Any:
        """``payload``, whose endpoint runs in an OpenTelemetry span below that of ``trace``."""

    def payload_keeping(self, payload: Any, number: int, label: str) -> Any:
        """``payload`` of a call whose results stay in their processes as object ``number``; a description replaces each
        in its reply. ``label`` names the call."""

    def payload_making_room(self, payload: Any, numbers: Sequence[int]) -> Any:
        """``payload``; a process that unpickles it forgets what it keeps as the objects ``numbers``."""

    def kept_argument(self, delivery: int, argument: int) -> Any:
        """What unpickles as a kept value that was delivered to the process for this ``argument`` of a call."""

    def kept_reference(
        self,
        number: int,
        label: str,
        places: Sequence[tuple[int, int]],
        at: int | None,
        whole: Region | None,
        passed: tuple[int, int, int] | None,
    ) -> Any:
        """What unpickles as a reference to a kept value of object ``number``, the results of call ``label``.

        ``places`` are the positions and base ranks of the values, by rank of the call that gets the references, or
        ``at`` is the index of the only one that matters. With ``whole`` it is a ``ValueMesh`` of all, of that shape.
        ``passed`` is how the process says that it has arrived.
        """


class CallSender(Protocol):
    """Calls and their replies."""

    def cast(self, actors: Any, endpoint: str, explicit_port: bool, payload: Any, port: Any | None) -> None:
        """Sends a call to actors, which may still be coming up. Replies go to ``port``."""

    def call(
        self, actors: Any, endpoint: str, explicit_port: bool, payload: Any, number: int = 0, *, several: bool = False
    ) -> Any:
        """Sends a call to actors, which may still be coming up. Returns the receiver of their replies.

        ``number`` lets the processes know which call of the session it is. The engine must have set them up.
        ``several``: the receiver is for ``receive_several``. Without an explicit port, each rank may reply only once,
        and without ``several``, only one rank may.
        """

    def size_in_batch(self, payload: Any) -> int | None:
        """The bytes that a call with ``payload`` takes in a batch; None if it must be sent alone."""

    def call_batch(self, actors: Any, calls: Sequence[tuple[str, Any, int]]) -> Any:
        """Sends calls in one message: each an endpoint without an explicit port, a payload and the number of the call.

        The engine must have set up the actors' processes. They run in this order. Returns the receiver of their
        replies.
        """

    def replies_of(self, message: Any) -> list[BatchedReply]:
        """The replies in a message to a batch, their pickles unopened."""

    def call_supervised(
        self, actors: Any, endpoint: str, explicit_port: bool, payload: Any, number: int = 0, *, several: bool = False
    ) -> tuple[Any, asyncio.Future[Any]]:
        """As ``call``, and asks for the next fault of the actors, which Monarch may report to another owner or to none.

        The returned future raises an exception with the report when one of the actors fails or stops, when they are
        stopped, or when their owner has not answered for Monarch's ``supervision_watchdog_timeout``. It has no result.
        """

    def open_port(self) -> tuple[Any, Any]:
        """A port to send along, and its receiver for ``receive``."""

    def receive(self, receiver: Any) -> asyncio.Future[Any]:
        """A future of the receiver's next message, for ``reply_of``."""

    def receive_several(self, receiver: Any) -> asyncio.Future[list[Any]]:
        """A future of the messages that the receiver has by then, at least one, in the order of their arrival."""

    def close(self, receiver: Any) -> None:
        """Closes the port of a receiver whose future was cancelled, and which is used no more."""

    def reply_of(self, message: Any) -> Reply:
        """The reply in a message, its pickle unopened."""


class PortSender(Protocol):
    """Ports that the client and workers send to."""

    def port_name(self, port: Any) -> str:
        """How workers name the port."""

    def port_at(self, address: str) -> Any:
        """The port that a worker sent the address of."""

    def send_to_port(self, port: Any, payload: Any, *, return_undeliverable: bool = True) -> None:
        """Sends a value. Raises ValueError if it refers to a mesh that is not up yet.

        A value that cannot be delivered is a fault, or is dropped without ``return_undeliverable``.
        """


class Arguments(Protocol):
    """Ports and actors among the arguments of a call."""

    def port_argument(self, port: Any) -> Any:
        """``port`` as users see it."""

    def actors_argument(self, class_data: Fragments, name: str, actors: Any, region: Region, procs: Any) -> Any:
        """An actor mesh as users see it."""

    def dump_actors(self, class_data: Fragments, name: str, actors: Any, region: Region, procs: Any) -> bytes:
        """A plain pickle of an actor mesh that is up, for a worker."""


class References(Protocol):
    """Meshes that workers return."""

    def reference_from_bytes(self, kind: str, data: bytes) -> Any:
        """The reference to a mesh of ``kind`` ("hosts", "procs" or "actors") that a worker pickled."""

    def adopt_hosts(self, reference: Any, region: Region) -> Any:
        """The host mesh behind a reference that arrived from a worker."""

    def adopt_procs(self, reference: Any, hosts: Any, region: Region, root: Region) -> Any:
        """The proc mesh behind a reference that arrived from a worker."""

    same_versions: SameVersions
    """Refuses to create actors in processes with other versions."""


class ControllerActors(Arguments, Readiness, Protocol):
    """Controllers: actors that the session keeps by name."""

    controllers_class: ClassVar[bytes]
    """A pickle of the actor class that keeps controllers by name and has the endpoint ``get_or_spawn``."""

    def find_controllers_at(self, address: str, secret: str) -> None:
        """Makes actors that are spawned from now on ask at ``address`` for the session's controllers."""


class Configurable(Protocol):
    """Monarch's settings."""

    async def configure(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Sets Monarch's settings and returns all that are in effect, as booleans, numbers, strings and None.

        They apply to this process, and to processes that are spawned from now on; some are kept from hosts, which serve
        other sessions too. Settings of an earlier call that are
        missing return to their previous values. Raises ValueError or TypeError, and changes nothing, if Monarch does
        not have a setting or rejects its value.
        """


class Collecting(Protocol):
    """Monarch's telemetry."""

    def collector(self, retention: int, host_metrics: float, gpu_metrics: float) -> Collector:
        """Collects telemetry of this process and those that it spawns. Create it before hosts are attached to.
        Hosts and GPUs are sampled at these intervals, in seconds, or never (0); releases before 0.8 cannot."""


class Monarch(
    HostAttacher,
    Slicer,
    Spawner,
    EngineActors,
    Stopper,
    Payloads,
    CallSender,
    PortSender,
    References,
    ControllerActors,
    Configurable,
    Collecting,
    Protocol,
):
    """This process's Monarch root client. Create one per process, on the thread that runs the event loop.

    A part of the engine depends on those of its Protocols that it needs.
    """

    sync_context: ClassVar[str]
    """``module:name``, on workers, of the context manager in which Monarch runs a bootstrap that is not a coroutine."""

    log_prefix: ClassVar[str]
    """``module:name``, on workers, of whether Monarch puts the actor before each message of ``logging``."""

    root: str
    """The actor id of this process, by which workers recognize its ports."""

    def __init__(self, transport: str | None, on_fault: OnFault) -> None:
        """Configures and loads Monarch.

        ``transport`` is a channel address such as ``tcp://10.0.0.3:0``, or None for unix sockets. Monarch calls
        ``on_fault`` on a thread of its own.
        """


class UnsupportedMonarch(Exception):
    """The installed torchmonarch is missing or of a release without an adapter."""


def module_for(version: str | None) -> str:
    """The module that adapts torchmonarch ``version``, such as ``0.7.0``. Raises UnsupportedMonarch."""
    supported = ", ".join(f"{release}.*" for release in SUPPORTED)
    if version is None:
        raise UnsupportedMonarch(
            f"torchmonarch is not installed. Install one of the supported releases ({supported}): "
            "pip install 'meshgate[gateway]'"
        )
    module = SUPPORTED.get(".".join(version.split(".")[:2]))
    if module is None:
        raise UnsupportedMonarch(
            f"torchmonarch {version} is not supported. Supported releases: {supported}. Install one of them on the "
            "gateway and on the workers"
        )
    return module


def installed_version() -> str | None:
    try:
        return importlib.metadata.version("torchmonarch")
    except importlib.metadata.PackageNotFoundError:
        return None


def native_hosts(name: str, hosts: Sequence[Mapping[str, Any]], transport: str | None) -> Any:
    """Monarch's own ``HostMesh`` of these hosts of the job, for a program that was submitted to it; see
    ``meshgate.native_hosts``. ``transport``: as of ``connect``. Raises UnsupportedMonarch."""
    release = importlib.import_module(module_for(installed_version()))
    return release.attach_natively(name, [Host.model_validate(host) for host in hosts], transport)


def transport_at(host: str) -> str:
    """The channel address at which this process listens on ``host``, a name or an IP address."""
    return f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0"


def connect(transport: str | None, on_fault: OnFault) -> Monarch:
    """This process's Monarch root client; see ``Monarch.__init__``. Raises UnsupportedMonarch."""
    client: Monarch = importlib.import_module(module_for(installed_version())).Client(transport, on_fault)
    return client


_SPAWN_TIMEOUT = re.compile(r"^error spawning proc mesh: statuses: .*\bTimeout\((\d+)[.\d]*(\w+)\)", re.DOTALL)
_RUNNING = re.compile(r"^error spawning actor mesh: statuses: (?:.*;)?Running=(\d+\.\.\d+(?:,\d+\.\.\d+)*)", re.DOTALL)


def error_text(error: BaseException) -> str:
    """The message of ``error`` without the Rust backtrace that Monarch appends, or only that of a version check."""
    report = str(error).partition("\n\nStack backtrace:\n")[0].rstrip()
    if found := _SPAWN_TIMEOUT.search(report):
        report += (
            f": the processes did not start within {found[1]} {found[2]}. Busy hosts, or slow file systems, may need "
            "longer: "
            'meshgate.config.configure(mesh_proc_spawn_max_idle="5m")'
        )
    if _SILENT.search(report):
        report += _SILENT_HINT
    if _ORPHANED.search(report):
        report += _ORPHANED_HINT
    return version_problem(report) or report


def running_positions(report: str) -> set[int]:
    """The positions in a mesh of the processes that do answer, if ``report`` says that actors could not be spawned."""
    found = _RUNNING.search(report)
    ranges = (each.split("..") for each in found[1].split(",")) if found else ()
    return {position for start, stop in ranges for position in range(int(start), int(stop))}


def unreachable_addresses(report: str, addresses: Sequence[str]) -> list[str]:
    """Those of ``addresses`` that did not answer, if ``report`` is about a failed attach."""
    if not report.startswith("attach failed"):
        return []
    return [address for address in addresses if re.search(rf"{re.escape(address.replace('://', ':'))}\b", report)]


def refusing_address(report: str) -> str:
    """The address of a worker that answers, but does not know the host that was attached to there: it has another
    release of Monarch, or another identity. Empty if ``report`` is about something else."""
    found = _REFUSED.search(report)
    return found[1] if found else ""


def reports_a_stop(report: str) -> bool:
    """Whether ``report`` is about an actor that ended without a failure: Monarch reports that to calls alone."""
    return _STOPPED.search(report) is not None


def silent_position(report: str, size: int) -> int | None:
    """The position, in a mesh of ``size`` actors, of the one whose process no longer answers; None: it is not known.
    Monarch reports that to calls alone, as the end of the actor, without its rank."""
    if (found := _SILENT.search(report)) is None:
        return None
    position, extent = 0, 1
    for at, of in re.findall(r"(\d+)/(\d+)", found["point"] or ""):
        position, extent = position * int(of) + int(at), extent * int(of)
    return position if extent == size else None


def exit_code(report: str) -> int | None:
    """The exit code of the process that ``report`` is about, negative for a signal; None: it does not say one."""
    found = _EXITED.match(report)
    return None if found is None else int(found[1]) if found[1] else -int(found[2])


def explain_fault(report: str) -> str:
    """``report``, with a likely cause if a process got SIGKILL; if a version check failed, only its error."""
    return version_problem(report) or (f"{report}{_KILLED_HINT}" if _KILLED in report else report)
