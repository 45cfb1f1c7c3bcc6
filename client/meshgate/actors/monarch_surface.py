"""Monarch's public names that meshgate does not have, each with the reason, and what takes the place of its job names.

``docs/compatibility.md`` is written from these tables, and tests compare them with the installed Monarch: a new name of
a new release fails them until it is available here or listed.
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

JOB_MODULES = ("monarch.job", "monarch.job.kubernetes", "monarch.job.spmd", "monarch.spmd")

# Of the job modules, each with its public members, except for those in UNAVAILABLE_JOB_NAMES.
AVAILABLE_JOB_NAMES = {
    "monarch.job.JobState": "meshgate.JobState",
    "monarch.job.JobTrait": "meshgate.JobTrait",
    "monarch.job.LocalJob": "meshgate.LocalJob",
    "monarch.job.MeshAdminConfig": "meshgate.MeshAdminConfig",
    "monarch.job.ProcessJob": "meshgate.ProcessJob",
    "monarch.job.SlurmJob": "meshgate.SlurmJob",
    "monarch.job.TelemetryConfig": "meshgate.TelemetryConfig",
    "monarch.job.job_load": "meshgate.job_load",
    "monarch.job.job_loads": "meshgate.job_loads",
    "monarch.job.kubernetes.ImageSpec": "meshgate.ImageSpec",
    "monarch.job.kubernetes.KubeConfig": "meshgate.KubeConfig",
    "monarch.job.kubernetes.KubernetesJob": "meshgate.KubernetesJob",
    "monarch.job.spmd.SPMDJob": "meshgate.spmd.SPMDJob",
    "monarch.job.spmd.serve": "meshgate.spmd.serve",
}

_IDENTITY = "the job gives workers their identities and attaches to them"
_SELECTED_BY_NAME = "Monarch's command line selects a job for a project; here state(cached_path=...) finds it"
_SPMD_ACTOR = "serve(..., job=...) runs a script on the hosts of any job, procs.setup_torch() sets variables for actors"

# "Class.member" is a member of a class, "Class(name)" a parameter. A member that exists here raises JobUnsupported.
UNAVAILABLE_JOB_NAMES = {
    "monarch.job.DEFAULT_JOB_PATH": "the default of state(cached_path=...)",
    "monarch.job.PortForwarder": "job.forward(), or `meshgate forward`",
    "monarch.job.SERVICE_PROC_IDS_ENV": _IDENTITY,
    "monarch.job.SERVICE_PROC_RANK_ENV": _IDENTITY,
    "monarch.job.SlurmJob(attach_to)": "the driver reaches workers through the gateway only",
    "monarch.job.SlurmJob(bind_to)": "each worker listens on the address by which it reaches the gateway",
    "monarch.job.SlurmJob(out_of_cluster)": "the gateway is in the cluster; login= names a login node",
    "monarch.job.deserialize_service_proc_ids": _IDENTITY,
    "monarch.job.exec_command": "job.exec(), or `meshgate exec`",
    "monarch.job.hosts_from_config": "construct the job in the program, or load a saved one with job_load()",
    "monarch.job.kubernetes.KubernetesJob(attach_to)": "the driver reaches workers through the gateway only",
    "monarch.job.load_current_job": _SELECTED_BY_NAME,
    "monarch.job.new_service_proc_id": _IDENTITY,
    "monarch.job.ranked_service_proc_id_from_env": _IDENTITY,
    "monarch.job.serialize_service_proc_ids": _IDENTITY,
    "monarch.job.service_proc_addr": _IDENTITY,
    "monarch.job.service_proc_addrs": _IDENTITY,
    "monarch.job.set_current_job": _SELECTED_BY_NAME,
    "monarch.job.shell": "job.shell(), or `meshgate shell`",
    "monarch.job.spmd.StoreJob": "its driver is a rank of a torchrun that runs already; start the ranks with serve()",
    "monarch.spmd.SPMDActor": _SPMD_ACTOR,
    "monarch.spmd.setup_torch_elastic_env": "procs.setup_torch()",
    "monarch.spmd.setup_torch_elastic_env_async": "procs.setup_torch(), in asyncio.to_thread()",
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


def place_of(name: str) -> str:
    """Where a name of Monarch's job modules is here, or why it is missing; "" if they have no such name."""
    for module in JOB_MODULES:
        full = f"{module}.{name}"
        if full in AVAILABLE_JOB_NAMES:
            return f"it is {AVAILABLE_JOB_NAMES[full]}"
        if full in UNAVAILABLE_JOB_NAMES:
            return UNAVAILABLE_JOB_NAMES[full]
    return ""
