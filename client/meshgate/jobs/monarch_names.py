"""Monarch's public names for jobs: what takes their place here, and those that are missing, each with the reason.

``docs/compatibility.md`` is written from these tables, and a test compares them with the installed Monarch: a new name
of a new release fails that test until it is available here or listed. The names of actors are in
``meshgate.actors.monarch_surface``.
"""

from __future__ import annotations

MODULES = ("monarch.job", "monarch.job.kubernetes", "monarch.job.spmd", "monarch.spmd")

# Each with its public members, except for those in UNAVAILABLE.
AVAILABLE = {
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
UNAVAILABLE = {
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


def place_of(name: str) -> str:
    """Where a name of Monarch's job modules is here, or why it is missing; "" if they have no such name."""
    for module in MODULES:
        full = f"{module}.{name}"
        if full in AVAILABLE:
            return f"it is {AVAILABLE[full]}"
        if full in UNAVAILABLE:
            return UNAVAILABLE[full]
    return ""
