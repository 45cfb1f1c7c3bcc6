"""Drive Monarch actor meshes on a cluster from anywhere, over one websocket.

    import meshgate as kt

    with kt.ProcessJob({"workers": 2}) as job:
        procs = job.state().workers.spawn_procs(per_host={"gpus": 2})
        trainers = procs.spawn("trainers", Trainer)
        print(trainers.step.call(batch_size=32).get())

Importing this package is cheap: each name is loaded on first use. It never needs torchmonarch or the gateway.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshgate.actors.api import (
        Context,
        as_endpoint,
        context,
        current_actor_name,
        current_rank,
        current_size,
        get_meter,
        span,
        this_host,
        this_proc,
        traced,
    )
    from meshgate.errors import (
        ActorError,
        AuthenticationError,
        BootstrapFailed,
        CallCancelledError,
        ClassNotImportable,
        ConnectionFailedError,
        EngineDiedError,
        ErrorKind,
        GatewayError,
        GatewayFault,
        GatewayLostError,
        ImageStepFailed,
        InvalidRequestError,
        JobCacheWarning,
        JobError,
        JobFileError,
        JobNotRunning,
        JobStartFailed,
        JobUnsupported,
        MeshFailure,
        MeshgateError,
        PullFailed,
        SessionExpiredError,
        SessionTakenOverError,
        SpawnFailed,
        SPMDFailed,
        StaleCodeError,
        StaleCodeWarning,
        StepFailedError,
        SupervisionError,
        UnpicklableArgument,
        UnreadableResult,
        ValueLostError,
        VersionMismatchError,
    )
    from meshgate.images.dockerfile import DockerfileError
    from meshgate.images.image import Image
    from meshgate.jobs.joined import native_hosts
    from meshgate.jobs.kubernetes.compute import Compute
    from meshgate.jobs.kubernetes.job import ImageSpec, KubeConfig, KubernetesJob
    from meshgate.jobs.process import LocalJob, ProcessJob
    from meshgate.jobs.runs import Run
    from meshgate.jobs.sessions import SessionInfo
    from meshgate.jobs.slurm.job import SlurmJob
    from meshgate.jobs.state import JobState
    from meshgate.jobs.trait import JobTrait, job_load, job_loads
    from meshgate.proxies import (
        Accumulator,
        ActorMeshProxy,
        EndpointProxy,
        HostMesh,
        HostMeshProxy,
        ProcMesh,
        ProcMeshProxy,
        send,
    )
    from meshgate.proxies.attached import AttachedCall, AttachedSession
    from meshgate.proxies.client import (
        Channel,
        Client,
        current_client,
        get_or_spawn_controller,
        shutdown_context,
        use_client,
    )
    from meshgate.proxies.kept import KeptInfo, KeptMesh
    from meshgate.proxies.launch import BootstrapCommand, default_bootstrap_cmd
    from meshgate.proxies.ports import Port, PortReceiver, RankedPortReceiver
    from meshgate.proxies.static_types import Actor, Endpoint, concurrent_endpoint, endpoint
    from meshgate.ranks.telemetry import MeshAdminConfig, TelemetryConfig
    from meshgate.session.detached import tag
    from meshgate.session.dialing import Dialer, Route, UrlDialer
    from meshgate.session.futures import Future, FutureProxy
    from meshgate.session.objects import EndingHost
    from meshgate.session.returns_future import returns_future
    from meshgate.session.settings import ClientSettings
    from meshgate.shapes.ndslice import Slice
    from meshgate.shapes.shape import Extent, Point, Region, Shape
    from meshgate.shapes.value_mesh import ValueMesh
    from meshgate_sync.errors import LinkLeavesTree, TreeError, TreeTooLarge, UnstableFile
    from meshgate_wire.status import RunStatus

__version__ = "0.1.0"

_HOMES = {
    "meshgate.actors.api": (
        "Actor Context Endpoint as_endpoint concurrent_endpoint context current_actor_name current_rank current_size "
        "endpoint get_meter span this_host this_proc traced"
    ),
    "meshgate.jobs.sessions": "SessionInfo",
    "meshgate.proxies.attached": "AttachedCall AttachedSession",
    "meshgate.proxies.client": "Channel Client current_client get_or_spawn_controller shutdown_context use_client",
    "meshgate.proxies.kept": "KeptInfo KeptMesh",
    "meshgate.proxies.launch": "BootstrapCommand default_bootstrap_cmd",
    "meshgate.proxies.ports": "Port PortReceiver RankedPortReceiver",
    "meshgate.ranks.telemetry": "MeshAdminConfig TelemetryConfig",
    "meshgate.session.detached": "tag",
    "meshgate.session.dialing": "Dialer Route UrlDialer",
    "meshgate.errors": (
        "ActorError AuthenticationError BootstrapFailed CallCancelledError ClassNotImportable ConnectionFailedError "
        "EngineDiedError ErrorKind GatewayError GatewayFault GatewayLostError ImageStepFailed InvalidRequestError "
        "JobCacheWarning JobError JobFileError JobNotRunning JobStartFailed JobUnsupported MeshFailure MeshgateError "
        "PullFailed SPMDFailed SessionExpiredError SessionTakenOverError SpawnFailed StaleCodeError "
        "StaleCodeWarning StepFailedError SupervisionError UnpicklableArgument UnreadableResult ValueLostError "
        "VersionMismatchError"
    ),
    "meshgate.session.futures": "Future FutureProxy",
    "meshgate.session.objects": "EndingHost",
    "meshgate.session.returns_future": "returns_future",
    "meshgate.jobs.joined": "native_hosts",
    "meshgate.jobs.kubernetes.compute": "Compute",
    "meshgate.images.dockerfile": "DockerfileError",
    "meshgate.images.image": "Image",
    "meshgate.jobs.kubernetes.job": "ImageSpec KubeConfig KubernetesJob",
    "meshgate.jobs.slurm.job": "SlurmJob",
    "meshgate.jobs.process": "LocalJob ProcessJob",
    "meshgate.jobs.runs": "Run",
    "meshgate.jobs.state": "JobState",
    "meshgate.jobs.trait": "JobTrait job_load job_loads",
    "meshgate.proxies": ("Accumulator ActorMeshProxy EndpointProxy HostMesh HostMeshProxy ProcMesh ProcMeshProxy send"),
    "meshgate.session.settings": "ClientSettings",
    "meshgate.shapes.ndslice": "Slice",
    "meshgate.shapes.shape": "Extent Point Region Shape",
    "meshgate.shapes.value_mesh": "ValueMesh",
    "meshgate_wire.status": "RunStatus",
    "meshgate_sync.errors": "LinkLeavesTree TreeError TreeTooLarge UnstableFile",  # job.sync() raises these
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
# Monarch's own where Monarch started the process for actors: what actors open, call and catch is Monarch's there. The
# modules of the client would cost each process 0.2 s of processor time.
_MONARCHS_IN_WORKERS = {
    "Accumulator", "ActorError", "Channel", "Port", "PortReceiver", "SupervisionError", "get_or_spawn_controller",
    "send",
}  # fmt: skip

__all__ = [
    "Accumulator", "Actor", "ActorError", "ActorMeshProxy", "AttachedCall", "AttachedSession", "AuthenticationError",
    "BootstrapFailed", "CallCancelledError", "BootstrapCommand", "Channel", "ClassNotImportable", "Client",
    "ClientSettings", "Compute", "ConnectionFailedError", "Context", "Dialer", "DockerfileError", "EndingHost",
    "Endpoint", "EndpointProxy", "EngineDiedError", "ErrorKind", "Extent", "Future", "FutureProxy", "GatewayError",
    "GatewayFault", "GatewayLostError", "HostMesh", "HostMeshProxy", "Image", "ImageSpec", "ImageStepFailed",
    "InvalidRequestError", "JobCacheWarning", "JobError", "JobFileError", "JobNotRunning", "JobStartFailed", "JobState",
    "JobTrait", "JobUnsupported", "KeptInfo", "KeptMesh", "KubeConfig", "KubernetesJob", "LinkLeavesTree", "LocalJob",
    "MeshAdminConfig", "MeshFailure", "MeshgateError", "Point", "Port", "PortReceiver", "ProcMesh", "ProcMeshProxy",
    "ProcessJob", "PullFailed", "RankedPortReceiver", "Region", "Route", "Run", "RunStatus", "SPMDFailed",
    "SessionExpiredError", "SessionInfo", "SessionTakenOverError", "Shape", "Slice", "SlurmJob", "SpawnFailed",
    "StaleCodeError", "StaleCodeWarning", "StepFailedError", "SupervisionError", "TelemetryConfig", "TreeError",
    "TreeTooLarge", "UnpicklableArgument", "UnreadableResult", "UnstableFile", "UrlDialer", "ValueLostError",
    "ValueMesh", "VersionMismatchError", "as_endpoint", "concurrent_endpoint", "context", "current_actor_name",
    "current_client", "current_rank", "current_size", "default_bootstrap_cmd", "endpoint", "get_meter",
    "get_or_spawn_controller", "job_load", "job_loads", "native_hosts", "returns_future", "send", "shutdown_context",
    "span", "tag", "this_host", "this_proc", "traced", "unhandled_fault_hook", "use_client",
]  # fmt: skip


def unhandled_fault_hook(failure: MeshFailure) -> None:
    """Called on its own thread with each failure of a process, host or actor. Assign another function to replace it.

    This one writes the failure to stderr and raises ``SystemExit``. If the hook raises, the failure is unhandled, and
    the main thread gets a ``KeyboardInterrupt``: the program leaves its ``with`` blocks and exits with status 130,
    unless it begins to end by itself within a second. After any other hook it continues, and so does a notebook or a
    prompt. If a program replaces ``monarch.actor.unhandled_fault_hook`` instead, that is the one called.
    """
    from meshgate.session.errors.faults import default_fault_hook  # noqa: PLC0415 - keeps the import of meshgate cheap

    default_fault_hook(failure)


_own_fault_hook = unhandled_fault_hook  # to see whether a program has assigned another


def __getattr__(name: str) -> Any:
    if name == "config":
        return importlib.import_module("meshgate.config")
    home = _HOME_OF.get(name)
    if home is None:
        raise _missing(name)
    if name in _MONARCHS_IN_WORKERS and (api := importlib.import_module("meshgate.actors.api")).in_worker_process():
        found = api.monarchs(name)
    else:
        found = getattr(importlib.import_module(home), name)
    globals()[name] = found
    return found


def _missing(name: str) -> Exception:
    """The error for a name that this module does not have."""
    if name.startswith("_"):  # libraries ask for such names, and expect a quick answer
        return AttributeError(f"module 'meshgate' has no attribute {name!r}")
    surface: Any = importlib.import_module("meshgate.actors.monarch_surface")
    reason = surface.FORMER.get(name) or surface.place_of(name)
    text = surface.missing_attribute("", name, () if reason else __all__, otherwise=f": {reason}" if reason else "")
    # `from meshgate import name` would replace the text of an AttributeError by its own, which gives no reason.
    if sys._getframe(2).f_code.co_name == "_handle_fromlist":
        util = importlib.import_module("importlib.util")
        if util.find_spec(f"meshgate.{name}") is None:  # not a module of the package, which is imported next
            text = text.replace(f"module 'meshgate' has no attribute {name!r}", f"cannot import {name!r} from meshgate")
            return ImportError(text, name="meshgate", path=__file__)
    return AttributeError(text, name=name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
