"""``meshgate ls``, ``meshgate kill`` and ``meshgate gc``: the jobs of this machine, or of a cluster."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshgate.cli.console import AsJson, Namespace, age_text, emit, meshes_text, new_table
from meshgate.cli.models import ClusterEvent, Ended, JobRow, Jobs, Leftover, Leftovers, Scaled
from meshgate.errors import JobError, JobNotRunning, MeshgateError
from meshgate.jobs import registry
from meshgate.jobs.tokens import url_of_gateway
from meshgate_processes.marks import end_processes

if TYPE_CHECKING:
    from rich.console import Console

    from meshgate.jobs.kubernetes.job import JobProvider
    from meshgate_kubernetes.api.client import Api
    from meshgate_kubernetes.jobs.lifecycle import ListedJob


EVENTS_SHOWN = 50
GATEWAY_MODULE = b"meshgate_gateway"


def list_jobs(
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="Jobs in this namespace of a Kubernetes cluster.")
    ] = None,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="Jobs in all namespaces of a Kubernetes cluster.")
    ] = False,
    login: Annotated[
        str | None,
        typer.Option("--login", help="Your jobs on the Slurm cluster of this login node, a destination of ssh."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List running jobs.

    Shows the jobs of this machine and those that you may use behind the provisioning gateway of MESHGATE_URL; with a
    namespace, those of that gateway or of the cluster that KUBECONFIG names; with --login, your Slurm jobs, whichever
    machine has submitted them.
    """
    if login is not None:
        if namespace is not None or all_namespaces:
            raise typer.BadParameter("--login lists the jobs of a Slurm cluster, which has no namespaces")
        found = slurm_jobs(login)
        emit(found, as_json, lambda console: console.print(_slurm_table(found, login)))
        return
    if namespace is not None or all_namespaces:
        searched = "" if all_namespaces else namespace or ""
        jobs = cluster_jobs(searched)
        emit(jobs, as_json, lambda console: console.print(_cluster_table(jobs, searched)))
        return
    local, provisioned = local_jobs(), provisioned_jobs()

    def show(console: Console) -> None:
        if local.jobs or not provisioned.jobs:
            console.print(_local_table(local))
        if provisioned.jobs:
            console.print(_cluster_table(provisioned, ""))

    emit(Jobs(jobs=[*local.jobs, *provisioned.jobs]), as_json, show)


def kill_jobs(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="JOB", help="Ids or unique prefixes, or job files; in a cluster, names."),
    ] = None,
    all_jobs: Annotated[
        bool, typer.Option("--all", help="All your jobs on this machine, or all jobs in the namespace.")
    ] = False,
    session: Annotated[
        str | None, typer.Option("--session", help="Only this session of the job, by name or the start of its id.")
    ] = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """End jobs and all their processes or pods.

    With --session only that session of one job, which may be left out as elsewhere. The job and its other sessions
    stay.
    """
    if "" in (ids or []):  # as of a shell's variable that is not set: every id begins with it
        raise typer.BadParameter("the id of the job is empty; run `meshgate ls` to list the jobs")
    if session is not None:
        _end_session(ids or [], session, namespace, all_jobs=all_jobs, as_json=as_json)
        return
    report = (lambda line: None) if as_json else typer.echo
    if namespace is not None:
        ended = _kill_in_cluster(ids or [], namespace, all_jobs=all_jobs, report=report)
    else:
        ended = _kill_here(ids or [], all_jobs=all_jobs, report=report)
    emit(ended, as_json, lambda console: None)


def _end_session(ids: list[str], session: str, namespace: str | None, *, all_jobs: bool, as_json: bool) -> None:
    from meshgate.jobs.find import find_job  # noqa: PLC0415 - `meshgate ls` does not need it

    if all_jobs or len(ids) > 1:
        raise typer.BadParameter("--session ends one session of one job")
    found = find_job(ids[0] if ids else None, namespace).end_session(session, None)
    named = f"{found.name} (id {found.id[:8]})" if found.name else found.id[:8]
    emit(Ended(ended=[found.id]), as_json, lambda console: console.print(f"ended session {named}"))


def scale_mesh(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A job file, or with -n a name.")],
    mesh: Annotated[str, typer.Argument(metavar="MESH", help="The host mesh.")],
    hosts: Annotated[int, typer.Argument(metavar="HOSTS", min=1, help="The number of hosts that it will have.")],
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=0.001, help="Seconds to wait for new hosts, or the end of removed ones."),
    ] = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Change the number of hosts of a mesh of a running job.

    Processes on hosts that stay continue. Removes the last hosts of the mesh, unless processes of any session run on
    them; new hosts that do not become ready are removed again.
    """
    from meshgate.jobs.find import find_job  # noqa: PLC0415 - `meshgate ls` does not need it

    find_job(job, namespace).scale(mesh, hosts, timeout=timeout)
    scaled = Scaled(mesh=mesh, hosts=hosts)
    emit(scaled, as_json, lambda console: console.print(f"mesh {mesh} has {hosts} hosts"))


def local_jobs() -> Jobs:
    return Jobs(jobs=[row_of(entry) for entry in registry.entries()])


def row_of(entry: registry.LocalEntry) -> JobRow:
    return JobRow(
        id=entry.apply_id,
        kind=entry.kind,
        meshes=entry.meshes,
        age=round(time.time() - entry.created, 1),
        pid=entry.pid,
        machine=entry.place,
        directory=entry.directory,
    )


def _local_table(jobs: Jobs) -> object:
    """What a terminal shows."""
    if not jobs.jobs:
        return "no jobs on this machine"
    found = new_table("ID", "KIND", "MESHES", "PID", "AGE", "DIRECTORY")
    for job in jobs.jobs:
        age = age_text(job.age)
        pid = f"{job.pid} on {job.machine}" if job.machine else str(job.pid)
        found.add_row(job.id[:8], job.kind, meshes_text(job.meshes), pid, age, _with_tilde(job.directory))
    return found


def _kill_here(ids: list[str], *, all_jobs: bool, report: Callable[[str], object]) -> Ended:
    """Calls ``report`` with a line for each job that was ended."""
    # Imported here because `meshgate ls` does not need them.
    from meshgate.jobs.find import find_job, slurm_name  # noqa: PLC0415
    from meshgate.jobs.local_gateway import stop_gateway  # noqa: PLC0415

    running = list(registry.entries())
    if not ids and not all_jobs:
        raise typer.BadParameter("name the jobs to end, or pass --all; run `meshgate ls` to list them")
    files = [] if all_jobs else [name for name in ids if slurm_name(name) or os.sep in name or os.path.exists(name)]
    saved = [find_job(path) for path in files]
    here = [entry for entry in running if not entry.place]
    found = here if all_jobs else [_find(running, prefix) for prefix in ids if prefix not in files]
    ended = []
    for job in saved:
        name, apply_id = repr(job), job.apply_id or ""
        job.kill()
        ended.append(apply_id)
        report(f"ended {name}")
    for entry in found:
        stop_gateway(entry.process, entry.apply_id, entry.temporary)
        registry.unregister(entry.apply_id)
        ended.append(entry.apply_id)
        report(f"ended {entry.apply_id[:8]} ({entry.kind}, pid {entry.pid})")
    return Ended(ended=ended)


def _find(running: list[registry.LocalEntry], prefix: str) -> registry.LocalEntry:
    matching = [entry for entry in running if entry.apply_id.startswith(prefix)]
    if not matching:
        listing = "run `meshgate ls` to list them; for a job in a cluster, pass its namespace with -n"
        raise JobNotRunning(f"no job id begins with {prefix!r}; {listing}")
    if len(matching) > 1:
        raise typer.BadParameter(f"{len(matching)} job ids begin with {prefix!r}; run `meshgate ls` to list them")
    matching[0].require_here()
    return matching[0]


def _with_tilde(directory: str) -> str:
    home = os.path.expanduser("~")
    return f"~{directory[len(home) :]}" if directory == home or directory.startswith(f"{home}/") else directory


def slurm_jobs(login: str) -> Jobs:
    """The Slurm jobs of this user. Says on stderr which of them cannot be read."""
    from meshgate.jobs.find import at_login  # noqa: PLC0415 - not for other jobs
    from meshgate.jobs.slurm.job import jobs_at  # noqa: PLC0415

    listed = jobs_at(at_login(login))
    for number in listed.unreadable:
        typer.echo(f"meshgate: Slurm job {number} is not listed: another version of meshgate submitted it", err=True)
    return Jobs(
        jobs=[
            JobRow(
                id=f"{login}:{each.job.job_id}",
                kind="SlurmJob",
                name=each.spec.job_name,
                state=f"{each.report.state} ({each.report.why})" if each.report.why else each.report.state,
                **each.report.model_dump(include={"partition", "account", "qos", "time_limit", "seconds_left"}),
                meshes=each.job.meshes,
                age=round(each.age, 1),
            )
            for each in listed.jobs
        ]
    )


def _slurm_table(jobs: Jobs, login: str) -> object:
    """What a terminal shows."""
    if not jobs.jobs:
        return f"no Slurm jobs at {login}"
    found = new_table("ID", "NAME", "STATE", "MESHES", "PARTITION", "AGE", "LEFT")
    for job in jobs.jobs:
        left = "" if job.seconds_left is None else age_text(job.seconds_left)
        found.add_row(job.id, job.name, job.state, meshes_text(job.meshes), job.partition, age_text(job.age), left)
    return found


def cluster_jobs(namespace: str) -> Jobs:
    """The jobs of ``namespace``, or of all namespaces if that is empty."""
    _, jobs = _provided(namespace)
    return Jobs(jobs=[_cluster_row(job) for job in jobs])


def provisioned_jobs() -> Jobs:
    """The jobs that this user may use behind the provisioning gateway of MESHGATE_URL, if that is set. If it cannot be
    asked, says so on stderr."""
    if url_of_gateway() is None:
        return Jobs(jobs=[])
    from meshgate.jobs.kubernetes.job import KubernetesJob  # noqa: PLC0415 - takes a fifth of a second
    from meshgate.jobs.kubernetes.remote_gateway import RemoteGateway  # noqa: PLC0415
    from meshgate.session.gateway_client import CreatesNoJobs  # noqa: PLC0415

    try:
        provider = KubernetesJob()._provider()
        found = provider.list_jobs("") if isinstance(provider, RemoteGateway) else []
    except CreatesNoJobs:
        found = []
    except (MeshgateError, ValueError) as error:
        typer.echo(f"meshgate: the jobs behind MESHGATE_URL are not listed: {error}", err=True)
        found = []
    return Jobs(jobs=[_cluster_row(job) for job in found])


def _provided(namespace: str) -> tuple[JobProvider, list[ListedJob]]:
    """What has the jobs of ``namespace`` (empty: of all), and these jobs: the provisioning gateway of MESHGATE_URL,
    else the cluster of KUBECONFIG."""
    from meshgate.jobs.kubernetes.cluster import Cluster  # noqa: PLC0415 - takes a fifth of a second
    from meshgate.jobs.kubernetes.job import KubernetesJob  # noqa: PLC0415
    from meshgate.session.gateway_client import CreatesNoJobs  # noqa: PLC0415

    provider = KubernetesJob(namespace=namespace or "default")._provider()
    try:
        return provider, provider.list_jobs(namespace)
    except CreatesNoJobs:  # MESHGATE_URL is the gateway of one job
        provider = Cluster.find(None)
        return provider, provider.list_jobs(namespace)


def _cluster_row(job: ListedJob) -> JobRow:
    return JobRow(
        id=job.name,
        kind="KubernetesJob",
        namespace=job.namespace,
        meshes=dict(job.meshes) if job.meshes is not None else None,
        age=round(time.time() - job.created, 1),
        owner=job.owner,
    )


def _cluster_table(jobs: Jobs, namespace: str) -> object:
    """What a terminal shows."""
    if not jobs.jobs:
        return f"no jobs in namespace {namespace!r}" if namespace else "no jobs in the cluster"
    found = new_table("NAME", "NAMESPACE", "MESHES", "AGE", "OWNER")
    for job in jobs.jobs:
        found.add_row(job.id, job.namespace, meshes_text(job.meshes), age_text(job.age), job.owner)
    return found


def _kill_in_cluster(names: list[str], namespace: str, *, all_jobs: bool, report: Callable[[str], object]) -> Ended:
    """Reports each job that was ended with a line. Raises JobNotRunning if one is unknown, and ends none."""
    from meshgate.jobs.kubernetes.remote_gateway import RemoteGateway  # noqa: PLC0415 - takes a fifth of a second

    provider, jobs = _provided(namespace)
    running = {job.name: job for job in jobs}
    if not names and not all_jobs:
        raise typer.BadParameter(f"name the jobs to end, or pass --all; run `meshgate ls -n {namespace}` to list them")
    for name in names:
        if name not in running:
            if isinstance(provider, RemoteGateway):
                provider.find_job(name, namespace)  # raises JobNotRunning, or says whose it is
            raise JobNotRunning(f"there is no job {name!r} in namespace {namespace!r}")
    ended = []
    for job in running.values() if all_jobs else [running[name] for name in names]:
        provider.end(job, quiet=True)
        ended.append(job.name)
        report(f"ended {job.namespace}/{job.name}")
    return Ended(ended=ended)


def objects_and_events(name: str, namespace: str) -> tuple[list[str], list[ClusterEvent]]:
    """The objects of the job as ``kind/name``, and what the cluster reported about them last; nothing without a
    kubeconfig, behind a provisioning gateway. Raises JobError if the API server cannot be used."""
    from meshgate_kubernetes.api.client import Api  # noqa: PLC0415 - takes a fifth of a second
    from meshgate_kubernetes.errors import KubernetesError  # noqa: PLC0415

    if behind_a_gateway(namespace):
        return [], []
    try:
        return _read_objects(Api.from_kubeconfig(), name, namespace)
    except KubernetesError as error:
        raise JobError(str(error)) from error


def behind_a_gateway(namespace: str) -> bool:
    """Whether the jobs of the namespace are reached through MESHGATE_URL, and not by a kubeconfig."""
    from meshgate.jobs.kubernetes.job import KubernetesJob  # noqa: PLC0415 - takes a fifth of a second
    from meshgate.jobs.kubernetes.remote_gateway import RemoteGateway  # noqa: PLC0415

    return isinstance(KubernetesJob(namespace=namespace)._provider(), RemoteGateway)


def _read_objects(api: Api, name: str, namespace: str) -> tuple[list[str], list[ClusterEvent]]:
    from meshgate_kubernetes.manifests.names import JOB_LABEL  # noqa: PLC0415

    objects = [
        f"{kind}/{found['metadata']['name']}"
        for kind in ("Deployment", "StatefulSet", "Pod", "Service")
        for found in api.list_objects(kind, namespace, f"{JOB_LABEL}={name}")[0]
    ]
    names = {known.partition("/")[2] for known in objects}
    events = [
        ClusterEvent(
            object=f"{found['involvedObject']['kind']}/{found['involvedObject']['name']}",
            reason=found.get("reason") or "",
            message=found.get("message") or "",
            count=found.get("count") or 1,
        )
        for found in api.list_objects("Event", namespace)[0]
        if found["involvedObject"].get("name") in names
    ]
    return objects, events[-EVENTS_SHOWN:]


def find_leftovers(proc: Path = Path("/proc")) -> list[Leftover]:
    """This user's processes that have a job's mark, if none of that job is its gateway. Empty without ``/proc``."""
    from meshgate.jobs.local_gateway import JOB_VARIABLE  # noqa: PLC0415

    jobs: dict[str, list[tuple[int, list[bytes]]]] = {}
    for entry in proc.iterdir() if proc.is_dir() else ():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        except OSError:  # has ended, or belongs to another user
            continue
        for variable in environment:
            name, _, job = variable.partition(b"=")
            if name == JOB_VARIABLE.encode() and job and command != [b""]:
                jobs.setdefault(job.decode(errors="replace"), []).append((int(entry.name), command))
    return [
        Leftover(job=job, pid=pid, command=b" ".join(command).decode(errors="replace")[:200])
        for job, processes in sorted(jobs.items())
        if not any(GATEWAY_MODULE in command[1:] for _, command in processes)
        for pid, command in processes
    ]


def end_leftovers(leftovers: list[Leftover]) -> None:
    from meshgate.jobs.local_gateway import JOB_VARIABLE  # noqa: PLC0415

    for job in {leftover.job for leftover in leftovers}:
        end_processes(f"{JOB_VARIABLE}={job}")


def collect_garbage(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="End them without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """End processes on this machine of jobs whose gateway is gone."""
    found = find_leftovers()
    if not as_json:
        for leftover in found:
            typer.echo(f"{leftover.pid:>8}  job {leftover.job[:8]}  {leftover.command}")
        if not found:
            typer.echo("nothing to end")
    ended = bool(found) and (yes or (not as_json and sys.stdin.isatty() and typer.confirm("End these processes?")))
    if ended:
        end_leftovers(found)
    result = Leftovers(processes=found, ended=ended)
    outcome = "ended" if ended else "not ended; pass --yes to end them"
    emit(result, as_json, lambda console: console.print(outcome) if found else None)
