"""Finds a running job by what a person types: an id, a name in a namespace, a job file, or a login node with Slurm's
number of the job."""

from __future__ import annotations

import os
from dataclasses import asdict

from meshgate.code_sync.project import working_directory
from meshgate.errors import JobError, JobNotRunning
from meshgate.jobs import registry
from meshgate.jobs.local_gateway import GatewayRecord
from meshgate.jobs.process import ProcessJob
from meshgate.jobs.saved import DEFAULT_JOB_PATH
from meshgate.jobs.trait import JobTrait, job_load


def find_job(name: str | None = None, namespace: str | None = None) -> JobTrait:
    """The running job ``name``.

    With ``namespace``, the name of a job in that namespace of a cluster. Otherwise the path of a job file, the
    beginning of the id of a job on this machine, or ``login:number`` of a Slurm job. Without a name, the job saved in
    this directory, the only one started here, or the only one on this machine. Raises JobNotRunning, or JobError if the
    name fits several jobs.
    """
    if name == "":  # as of a shell's variable that is not set
        raise JobError("the name of the job is empty; run `meshgate ls` to list the jobs")
    if namespace is not None:
        return _in_cluster(name, namespace)
    if name is None and os.path.exists(DEFAULT_JOB_PATH):
        name = DEFAULT_JOB_PATH
    if name is not None and (found := slurm_name(name)) is not None:
        from meshgate.jobs.slurm.job import SlurmJob  # noqa: PLC0415 - only these jobs need it

        return SlurmJob.find(found[1], at_login(found[0]))
    if name is not None and (os.sep in name or os.path.exists(name)):
        return _from_file(name)
    entry = find_local(name)
    entry.require_here()
    record = GatewayRecord(
        apply_id=entry.apply_id,
        url=entry.url,
        socket=entry.socket,
        token=entry.token,
        pid=entry.pid,
        started=entry.started,
        directory=entry.temporary,
    )
    job = ProcessJob._restore({"meshes": entry.meshes}, asdict(record))
    return _running(job, entry.apply_id)


def find_local(prefix: str | None) -> registry.LocalEntry:
    """The listed job whose id begins with ``prefix``; without one, the only job of this machine, first of this
    directory."""
    if prefix == "":
        raise JobError("the id of the job is empty; run `meshgate ls` to list the jobs")
    running = list(registry.entries())
    matching = [entry for entry in running if entry.apply_id.startswith(prefix or "")]
    if prefix is None:
        running = matching = [entry for entry in running if not entry.place]
        matching = [entry for entry in running if entry.directory == working_directory()] or matching
    if len(matching) == 1:
        return matching[0]
    if not running:
        raise JobNotRunning("no job runs on this machine; for a job in a cluster, pass its namespace with -n")
    listing = "run `meshgate ls` to list them"
    if prefix is None:
        raise JobError(f"{len(matching)} jobs run on this machine: name one; {listing}")
    if matching:
        raise JobError(f"{len(matching)} job ids begin with {prefix!r}; {listing}")
    raise JobNotRunning(f"no job id begins with {prefix!r}, and there is no such job file; {listing}")


def at_login(login: str) -> str | None:
    """The destination of ssh; None for ``localhost``, a login node on which the command itself runs."""
    return None if login == "localhost" else login


def slurm_name(name: str) -> tuple[str, int] | None:
    """The login node and the number of a Slurm job in ``user@host:4711``; None if it is another name or a file."""
    login, _, number = name.rpartition(":")
    return (login, int(number)) if login and number.isdecimal() and not os.path.exists(name) else None


def _from_file(path: str) -> JobTrait:
    try:
        job = job_load(path)
    except FileNotFoundError:
        raise JobNotRunning(f"there is no job file {path}") from None
    if not job.active or not job._is_running():
        raise JobNotRunning(f"the job in {path} has ended")
    job._cache_file = path  # kill() removes it
    return job


def _in_cluster(name: str | None, namespace: str) -> JobTrait:
    from meshgate.jobs.kubernetes.job import KubernetesJob  # noqa: PLC0415 - takes a fifth of a second

    if name is None:
        raise JobError(f"name the job; run `meshgate ls -n {namespace}` to list the jobs of the namespace")
    job = KubernetesJob(name=name, namespace=namespace)
    job.apply()  # a job without meshes finds the running one of this name, and starts nothing
    return job


def _running(job: JobTrait, apply_id: str) -> JobTrait:
    job._apply_id = apply_id
    job._status = "running"
    return job
