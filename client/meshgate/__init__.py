"""Drive Monarch actor meshes on a cluster from anywhere, over one websocket.

    import meshgate as kt

    with kt.ProcessJob({"workers": 2}) as job:
        procs = job.state().workers.spawn_procs(per_host={"gpus": 2})
        trainers = procs.spawn("trainers", Trainer)
        print(trainers.step.call(batch_size=32).get())

Importing this costs next to nothing: each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshgate.actors import (
        Actor,
        Context,
        Endpoint,
        as_endpoint,
        concurrent_endpoint,
        context,
        current_actor_name,
        current_rank,
        current_size,
        endpoint,
        get_or_spawn_controller,
        this_host,
        this_proc,
    )
    from meshgate.channel import Channel, Port, PortReceiver, RankedPortReceiver
    from meshgate.client import Client, current_client, use_client
    from meshgate.dialing import Dialer, Route, UrlDialer
    from meshgate.errors import (
        ActorError,
        AuthenticationError,
        ClassNotImportable,
        ConnectionFailedError,
        EngineDiedError,
        GatewayError,
        GatewayLostError,
        ImageStepFailed,
        InvalidRequestError,
        JobError,
        MeshFailure,
        MeshgateError,
        PullFailed,
        SessionExpiredError,
        StaleCodeError,
        StepFailedError,
        SupervisionError,
        UnpicklableArgument,
        UnreadableResult,
        VersionMismatchError,
    )
    from meshgate.extent import Extent, Point
    from meshgate.future import Future, FutureProxy
    from meshgate.jobs import JobState, JobTrait, LocalJob, ProcessJob, job_load, job_loads
    from meshgate.jobs.compute import Compute
    from meshgate.jobs.image import Image
    from meshgate.jobs.kubernetes import ImageSpec, KubernetesJob
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
    from meshgate.settings import ClientSettings
    from meshgate.shape import Region, Shape, Slice
    from meshgate.value_mesh import ValueMesh

__version__ = "0.1.0"

_HOMES = {
    "meshgate.actors": (
        "Actor Context Endpoint as_endpoint concurrent_endpoint context current_actor_name current_rank current_size "
        "endpoint get_or_spawn_controller this_host this_proc"
    ),
    "meshgate.channel": "Channel Port PortReceiver RankedPortReceiver",
    "meshgate.client": "Client current_client use_client",
    "meshgate.dialing": "Dialer Route UrlDialer",
    "meshgate.errors": (
        "ActorError AuthenticationError ClassNotImportable ConnectionFailedError EngineDiedError GatewayError "
        "GatewayLostError ImageStepFailed InvalidRequestError JobError MeshFailure MeshgateError PullFailed "
        "SessionExpiredError StaleCodeError StepFailedError SupervisionError UnpicklableArgument UnreadableResult "
        "VersionMismatchError"
    ),
    "meshgate.extent": "Extent Point",
    "meshgate.future": "Future FutureProxy",
    "meshgate.jobs.compute": "Compute",
    "meshgate.jobs.image": "Image",
    "meshgate.jobs.kubernetes": "ImageSpec KubernetesJob",
    "meshgate.jobs": "JobState JobTrait LocalJob ProcessJob job_load job_loads",
    "meshgate.proxies": ("Accumulator ActorMeshProxy EndpointProxy HostMesh HostMeshProxy ProcMesh ProcMeshProxy send"),
    "meshgate.settings": "ClientSettings",
    "meshgate.shape": "Region Shape Slice",
    "meshgate.value_mesh": "ValueMesh",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "Accumulator",
    "Actor",
    "ActorError",
    "ActorMeshProxy",
    "AuthenticationError",
    "Channel",
    "ClassNotImportable",
    "Client",
    "ClientSettings",
    "Compute",
    "ConnectionFailedError",
    "Context",
    "Dialer",
    "Endpoint",
    "EndpointProxy",
    "EngineDiedError",
    "Extent",
    "Future",
    "FutureProxy",
    "GatewayError",
    "GatewayLostError",
    "HostMesh",
    "HostMeshProxy",
    "Image",
    "ImageSpec",
    "ImageStepFailed",
    "InvalidRequestError",
    "JobError",
    "JobState",
    "JobTrait",
    "KubernetesJob",
    "LocalJob",
    "MeshFailure",
    "MeshgateError",
    "Point",
    "Port",
    "PortReceiver",
    "ProcMesh",
    "ProcMeshProxy",
    "ProcessJob",
    "PullFailed",
    "RankedPortReceiver",
    "Region",
    "Route",
    "SessionExpiredError",
    "Shape",
    "Slice",
    "StaleCodeError",
    "StepFailedError",
    "SupervisionError",
    "UnpicklableArgument",
    "UnreadableResult",
    "UrlDialer",
    "ValueMesh",
    "VersionMismatchError",
    "as_endpoint",
    "concurrent_endpoint",
    "context",
    "current_actor_name",
    "current_client",
    "current_rank",
    "current_size",
    "endpoint",
    "get_or_spawn_controller",
    "job_load",
    "job_loads",
    "send",
    "this_host",
    "this_proc",
    "unhandled_fault_hook",
    "use_client",
]


def unhandled_fault_hook(failure: MeshFailure) -> None:
    """Called, on a thread of its own, with each failure of a process, host or actor. Assign another to replace it.

    This one writes the failure to stderr.
    """
    from meshgate.faults import default_fault_hook  # noqa: PLC0415 - loaded when it is needed

    default_fault_hook(failure)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'meshgate' has no attribute {name!r}")
    found = getattr(importlib.import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
