"""Monarch's public names that meshgate does not have, each with the reason.

``docs/compatibility.md`` is written from this table, and a test compares it with the installed Monarch: a new name of a
new release fails that test until it is available here or listed.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshgate.suggestions import did_you_mean

_THE_JOB = "the job starts the workers and attaches to them"
_IN_ENGINE = "the root client runs in the gateway's engine, which the job configures"
_CODE = "job.sync() brings the code to the workers, and procs.reload() into running processes"
_TENSORS = (
    "distributed tensors need the program's process beside the workers, because each torch operation is a message: "
    "run them in an actor, or submit the program to the job and use meshgate.native_hosts() in it"
)
_PARAMETRIZE = "use pytest.mark.parametrize and configured()"

# By name, of monarch.actor, of monarch.config as "config.configure" or, as "HostMesh.sync_workspace", of a class.
UNAVAILABLE = {
    "ChannelTransport": _IN_ENGINE,
    "ProcId": _THE_JOB,
    "Uid": _THE_JOB,
    "attach": _THE_JOB,
    "attach_to_workers": _THE_JOB,
    "config.Encoding": "the engine forwards pickled messages, without an encoding",
    "config.parametrize_config": _PARAMETRIZE,
    "config.parametrize_config_pointwise": _PARAMETRIZE,
    "debug_controller": "Monarch's debugger serves its console in the program's process; use job.debug()",
    "enable_transport": _IN_ENGINE,
    "run_worker_loop_forever": _THE_JOB,
    "run_worker_loop_until_shutdown": _THE_JOB,
    "start_worker_loop_forever": _THE_JOB,
    "HostMesh.sync_workspace": _CODE,
    "ProcMesh.activate": _TENSORS,
    "ProcMesh.from_host_mesh": "use HostMesh.spawn_procs",
    "ProcMesh.rank_tensor": _TENSORS,
    "ProcMesh.rank_tensors": _TENSORS,
    "ProcMesh.sync_workspace": _CODE,
    "ProcMesh.to_table": "it prints the layout of distributed tensors; use extent and slice()",
}

_HOSTS = "the hosts of a job spawn processes, as in ProcessJob({'workers': 1}).state().workers.spawn_procs()"
_CLUSTER = "use SlurmJob(login=...), which works over ssh, KubernetesJob, or on this machine ProcessJob"

# Names of older releases of Monarch and of its package ``monarch``, which old programs import.
FORMER = {
    "ActorMeshRef": "ActorMeshProxy takes its place",
    "LoginJob": _CLUSTER,
    "MASTJob": _CLUSTER,
    "MonarchContext": "Context takes its place",
    "NDSlice": "Slice takes its place",
    "RemoteProcessGroup": _TENSORS,
    "SSHJob": _CLUSTER,
    "Stream": _TENSORS,
    "Tensor": _TENSORS,
    "debug_client": "use job.debug(), or `meshgate debug`",
    "fetch_shard": _TENSORS,
    "local_proc_mesh": _HOSTS,
    "per_actor_logging_prefix": "each line that is shown begins with its mesh, rank and host",
    "port": "Channel.open() returns a port",
    "proc_mesh": _HOSTS,
    "remote": _TENSORS,
    "sim_proc_mesh": "meshgate.testing.FakeJob runs actors without processes",
    "world_mesh": _TENSORS,
}

# Monarch's classes by the name of the class here that takes their place.
OWNERS = {
    "Accumulator": "Accumulator",
    "ActorError": "ActorError",
    "ActorMeshProxy": "ActorMesh",
    "Channel": "Channel",
    "Context": "Context",
    "EndpointProxy": "Endpoint",
    "Extent": "Extent",
    "FutureProxy": "Future",
    "HostMeshProxy": "HostMesh",
    "MeshFailure": "MeshFailure",
    "Point": "Point",
    "Port": "Port",
    "PortReceiver": "PortReceiver",
    "ProcMeshProxy": "ProcMesh",
    "ValueMesh": "ValueMesh",
}


def missing_attribute(owner: str, name: str, known: Iterable[str] = (), *, otherwise: str = "") -> str:
    """The message of the AttributeError for ``name`` of ``owner``, one of our classes, or "" for the module.

    It says why we lack what Monarch has, or which name of ``known`` is similar, or ends with ``otherwise``.
    """
    monarchs = f"{OWNERS.get(owner, owner)}.{name}" if owner else name
    if owner in ("", "config"):
        missing = f"module {'.'.join(filter(None, ('meshgate', owner)))!r} has no attribute {name!r}"
    else:
        missing = f"{owner!r} object has no attribute {name!r}"
    reason = UNAVAILABLE.get(monarchs)
    return f"{missing}, unlike Monarch: {reason}" if reason else missing + (did_you_mean(name, known) or otherwise)
