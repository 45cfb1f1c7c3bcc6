"""SlurmJob: nodes of a Slurm cluster, driven from anywhere through a gateway on a login node.

The arguments are Monarch's, and meshgate's own come after them by name. ``docs/slurm.md`` describes what a job needs on
the cluster. While it waits for its workers, what it waits for is shown on stderr.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, TextIO, TypeVar

from pydantic import ValidationError
from rich.console import Console
from rich.text import Text
from typing_extensions import Self

from meshgate.errors import ConnectionFailedError, GatewayLostError, JobError, JobNotRunning, JobStartFailed
from meshgate.images.image import Image
from meshgate.jobs.cluster_job import ClusterJob
from meshgate.jobs.joined import join
from meshgate.jobs.saved import DEFAULT_JOB_PATH
from meshgate.jobs.sessions import check_detached
from meshgate.jobs.slurm.access import (
    Access,
    LoginAccess,
    NodeAccess,
    SlurmSilent,
    UrlAccess,
    check_gateway_url,
    list_jobs,
)
from meshgate.jobs.slurm.login_node import LoginNode, SshLogin, ThisMachine, check_login
from meshgate.jobs.state import JobState
from meshgate.jobs.trait import JobTrait
from meshgate.progress import Block, new_console, progress_mode
from meshgate.proxies.client import Client
from meshgate.session.dialing import Dialer
from meshgate.suggestions import counts_as_meshes, explains_arguments
from meshgate_slurm.messages import BatchRequest, JobList, JobReport, RunningSlurmJob, StartRequest, surrounding_job
from meshgate_slurm.spec import SlurmSpec

FIRST_DELAY, LONGEST_DELAY = 0.1, 2.0
GATEWAY_TIMEOUT = 60.0  # seconds for which a gateway that does not answer is asked again
SLURM_TIMEOUT = 120.0  # seconds for which Slurm's controller is asked again: it restarts, or another machine takes over
INTERRUPT_WINDOW = 3.0  # seconds in which a second Ctrl-C cancels the job

T = TypeVar("T")


class SlurmJob(ClusterJob[RunningSlurmJob]):
    """Nodes of a Slurm cluster, each of them one Monarch host, with a gateway of their own on the login node.

    ``meshes`` maps names to numbers of nodes. ``login`` is where Slurm's commands are, as a destination of ssh; without
    it they are on this machine. ``gateway_url`` is instead a gateway that submits the job on behalf of the holder of
    ``$MESHGATE_TOKEN``, within its policy. With ``gateway_on="node"`` the job's gateway runs on its first node, and
    nothing of the job stays on the login node, which leads to it. ``python_exe`` is a Python on the login node and on
    the nodes that has ``meshgate[gateway,worker]``; without ``login``, "python" is the one that runs this program, or
    the gateway's. Each node has one worker, whatever ``ntasks_per_node`` is: that many tasks, of ``cpus_per_task``
    each, count when Slurm reserves CPUs.
    Each worker takes a free port unless ``monarch_port`` is set. Logs are in ``log_dir`` on the cluster (default:
    ``~/.meshgate/slurm/logs``).

    ``apply`` submits the job; ``state`` waits in the queue, for at most ``job_start_timeout`` seconds if it is set, and
    shows why. Ctrl-C there ends the wait, and a second one cancels the job. In a ``with`` block the job is cancelled
    when the block or this process ends. Otherwise it ends ``idle_timeout`` seconds (1800; 0: never) after its last
    session; ``lease`` is how long (14400) a session waits for a driver that has disconnected. ``warn_before`` seconds
    (600, or half of a time limit below 20 minutes; 0: never) before the time limit, a line is printed.
    Each process sees its part of the node's GPUs (``CUDA_VISIBLE_DEVICES``), or with ``split_gpus=False`` all of them.
    With ``detached``, which may be a name for the session, a session keeps running for its lease when its driver
    leaves, also at the end of a ``with`` block, and ``attach`` takes it over.
    ``env`` is added to the environment of the workers. ``sync_dirs``, ``watch`` and ``image`` are those of
    ``KubernetesJob`` and ``ProcessJob``. Raises ValueError or TypeError on invalid or contradictory arguments; does not
    contact the cluster before ``apply`` or ``state``.
    """

    @explains_arguments(counts_as_meshes)
    def __init__(
        self,
        meshes: Mapping[str, int],
        python_exe: str = "python",
        slurm_args: Sequence[str] = (),
        monarch_port: int | None = None,
        job_name: str = "monarch_job",
        ntasks_per_node: int = 1,
        time_limit: str | None = None,
        partition: str | None = None,
        log_dir: str | None = None,
        exclusive: bool = True,
        gpus_per_node: int | None = None,
        cpus_per_task: int | None = None,
        mem: str | None = None,
        job_start_timeout: float | None = None,
        account: str | None = None,
        qos: str | None = None,
        out_of_cluster: bool = False,
        attach_to: str | None = None,
        bind_to: str | None = None,
        *,
        login: str | None = None,
        gateway_url: str | None = None,
        gateway_on: Literal["login", "node"] = "login",
        split_gpus: bool = True,
        env: Mapping[str, str] | None = None,
        sync_dirs: Sequence[str] | None = None,
        watch: bool = False,
        image: Image | None = None,
        lease: float | None = None,
        idle_timeout: float | None = None,
        warn_before: float | None = None,
        detached: bool | str = False,
    ) -> None:
        if not isinstance(meshes, Mapping):
            raise TypeError(
                f"SlurmJob: meshes={meshes!r}: expected the number of nodes of each, such as {{'workers': 2}}"
            )
        super().__init__(sync_dirs, watch=watch)
        self._detached = check_detached(detached)
        refuse_direct_access(out_of_cluster=out_of_cluster, attach_to=attach_to, bind_to=bind_to)
        self._login_name = check_login(login) if login is not None else None
        self._gateway_url = check_gateway_url(gateway_url, login, python_exe, gateway_on)
        self._arguments: dict[str, Any] = {
            "meshes": dict(meshes),
            "python_exe": python_exe,
            "slurm_args": slurm_args,
            "monarch_port": monarch_port,
            "job_name": job_name,
            "ntasks_per_node": ntasks_per_node,
            "time_limit": time_limit,
            "partition": partition,
            "log_dir": log_dir,
            "exclusive": exclusive,
            "gpus_per_node": gpus_per_node,
            "cpus_per_task": cpus_per_task,
            "mem": mem,
            "account": account,
            "qos": qos,
            "gateway_on": gateway_on,
            "split_gpus": split_gpus,
            "env": env,
            "lease": lease,
            "idle_timeout": idle_timeout,
            "warn_before": warn_before,
        }
        if job_start_timeout is not None and not job_start_timeout > 0:
            raise ValueError(f"SlurmJob(job_start_timeout={job_start_timeout!r}): expected a number of seconds above 0")
        self._start_timeout = job_start_timeout
        if meshes:  # otherwise add_mesh() follows
            build_spec(self._arguments)
        if image is not None:
            self._images = dict.fromkeys(meshes, image)
        self._image = image
        self._access: Access | None = None

    def __repr__(self) -> str:
        where = f", login={self._login_name!r}" if self._login_name else ""
        where += f", gateway_url={self._gateway_url!r}" if self._gateway_url else ""
        number = f", job {self._job.job_id}" if self._job else ""
        return f"SlurmJob({self._arguments['meshes']}{where}{number})"

    @property
    def job_id(self) -> int | None:
        """Slurm's number of the job; None while it is not submitted."""
        running = self._running
        return running._job.job_id if isinstance(running, SlurmJob) and running._job else None

    def add_mesh(self, name: str, num_nodes: int) -> None:
        """Adds a mesh of ``num_nodes`` nodes to the same allocation; replaces a mesh of the same name."""
        if self.active:
            raise JobError("cannot add a mesh: this job is already running. Call add_mesh() before apply()")
        changed = {**self._arguments, "meshes": {**self._arguments["meshes"], name: num_nodes}}
        build_spec(changed)
        self._arguments = changed
        if self._image is not None:
            self._images[name] = self._image

    def share_node(self, tasks_per_node: int, gpus_per_task: int, partition: str) -> None:
        """Shares nodes with other jobs: takes ``tasks_per_node * gpus_per_task`` GPUs of each node of ``partition``,
        and of its CPUs and memory the same part."""
        if self.active:
            raise JobError("cannot share nodes: this job is already running. Call share_node() before apply()")
        changed = {
            **self._arguments,
            "exclusive": False,
            "share": True,
            "partition": partition,
            "ntasks_per_node": tasks_per_node,
            "gpus_per_node": tasks_per_node * gpus_per_task,
        }
        if self._arguments["meshes"]:
            build_spec(changed)
        self._arguments = changed

    @classmethod
    def find(cls, job_id: int, login: str | None = None) -> Self:
        """The job of this number that this user has submitted with meshgate from any machine. ``attach`` takes over its
        detached session. It has no ``env``, which is not recorded. Raises JobNotRunning if there is none that has not
        ended, and JobError."""
        listed, where = jobs_at(login), login or "this machine"
        if job_id in listed.unreadable:
            raise JobError(f"another version of meshgate has submitted Slurm job {job_id}: use that version for it")
        found = next((each for each in listed.jobs if each.job.job_id == job_id), None)
        if found is None:
            raise JobNotRunning(
                f"there is no running Slurm job {job_id} that you have submitted with meshgate on {where}; run "
                f"`meshgate ls --login {login or 'localhost'}` to list those"
            )
        spec = {"spec": found.spec.model_dump(mode="json"), "login": login, "job_start_timeout": None}
        job = cls._restore(spec, found.job.model_dump(mode="json"))
        job._apply_id, job._status = found.job.apply_id, "running"
        return job

    # --- implementation of JobTrait

    def _mesh_names(self) -> Collection[str]:
        return tuple(self._arguments["meshes"])

    def _find_joined(self) -> JobTrait | None:
        return join(self, None, "", self._arguments["meshes"])

    def _create(self, client_script: str | None) -> None:
        spec = build_spec(self._arguments)
        surrounding = surrounding_job()
        if self._detached and (surrounding is not None or client_script is not None):
            raise JobError(
                "SlurmJob(detached=...) cannot be used with a batch job, which ends with its own client: remove "
                "detached, or run the driver outside the allocation"
            )
        if surrounding is not None:
            self._join(surrounding, spec, client_script)
            return
        access = self._open()
        request = StartRequest(apply_id=str(self._apply_id), spec=spec)
        if client_script is not None:
            directory = os.getcwd() if self._is_local else "~"
            request = BatchRequest(apply_id=request.apply_id, spec=spec, client=client_script, directory=directory)
        try:
            with choose_progress() as progress:
                progress.show(f"submitting {spec.job_name} on {access}")
                ask_again_while_silent(lambda: access.start(request, self._take), progress, self._start_timeout)
        except SlurmSilent as error:
            raise JobStartFailed(f"{error}. Nothing was submitted") from error
        except BaseException:
            if self._job is not None:
                self._kill()  # otherwise nothing would end it: apply() fails
            raise

    def _take(self, job: RunningSlurmJob) -> None:
        self._job = job
        self._bind_if_scoped(job)

    def _join(self, surrounding: RunningSlurmJob, spec: SlurmSpec, client_script: str | None) -> None:
        """Takes the job that this program is the client of. Raises JobError."""
        if client_script is not None:
            raise JobError(f"cannot submit {client_script!r}: this program runs in Slurm job {surrounding.job_id}")
        if spec.meshes != surrounding.meshes:
            raise JobError(
                f"this program runs in Slurm job {surrounding.job_id}, which has the meshes {surrounding.meshes}, not "
                f"{dict(spec.meshes)}: pass the same meshes as the program that submitted it"
            )
        self._job = surrounding

    def state(self, cached_path: str | None = DEFAULT_JOB_PATH, *, wait: bool | float = False) -> JobState:
        return super().state(cached_path if surrounding_job() is None else None, wait=wait)

    state.__doc__ = JobTrait.state.__doc__

    def _require_job(self) -> RunningSlurmJob:
        job = super()._require_job()
        if not job.token:
            raise JobError(
                f"{self!r} is a batch job, which only its own client uses; its output is in {job.log_dir}. "
                "kill() cancels it"
            )
        return job

    def _spec_for_reaper(self) -> tuple[type[JobTrait], dict[str, Any]]:
        """The reaper does not need the environment of the workers, which may be too large for it."""
        saved = SlurmJob._spec(self)
        spec = {name: value for name, value in saved["spec"].items() if name != "env"}
        return SlurmJob, {**saved, "spec": spec}

    def _state(self) -> JobState:
        if self._client is not None:
            self._require_not_ended()
        return super()._state()

    def _connect(self) -> Client:
        self._wait(self._require_job())
        return super()._connect()

    def _dialer(self) -> Dialer:
        return self._open().dialer(self._require_job())

    def _require_not_ended(self) -> None:
        try:
            report = self._report()
        except ConnectionFailedError:  # cut: the session reconnects
            return
        if report.ended:
            raise JobNotRunning(f"{self!r} is not running: {report.why}. Call apply() to submit it again")

    def _wait(self, job: RunningSlurmJob) -> None:
        """Waits for the workers. Cancels the job if they do not come."""
        try:
            with choose_progress() as progress:
                wait_for_workers(self._report, progress, self._start_timeout, self._open().queue_interval)
        except JobStartFailed as error:
            try:
                self.kill()
            except JobError as left:
                raise JobStartFailed(
                    f"{error}\nThe job may still be in the queue, as it could not be cancelled: {left}; then "
                    f"`scancel {job.job_id}` cancels it"
                ) from left
            raise
        except KeyboardInterrupt:
            if not self._scoped and second_interrupt(job.job_id):
                self.kill()
            raise

    def _report(self) -> JobReport:
        try:
            return self._open().report(self._require_job())
        except GatewayLostError as error:
            raise JobNotRunning(f"{self!r} is not running: {error}. Call apply() to submit it again") from error

    def _kill(self) -> None:
        super()._kill()
        if self._access is not None:
            self._access.close()
            self._access = None

    def _allocation(self) -> dict[str, Any]:
        return super()._require_job().model_dump(mode="json")

    def _end(self, job: RunningSlurmJob) -> None:
        if self._ends_when_killed:
            self._open().end(job)

    @property
    def _ends_when_killed(self) -> bool:
        return not self._surrounds()  # a job ends with the program that runs in it

    def _surrounds(self) -> bool:
        """Whether this program is the client of this very job, which it then uses without the login node."""
        here, job = surrounding_job(), self._job
        return here is not None and job is not None and (job.cluster, job.job_id) == (here.cluster, here.job_id)

    def _is_running(self) -> bool:
        if self._job is None:
            return False
        if not self._job.token:
            return True  # until kill(): nothing watches a batch job
        job, access = self._job, self._open()
        try:
            return access.is_running(job)
        except SlurmSilent:
            with choose_progress() as progress:
                return ask_again_while_silent(lambda: access.is_running(job), progress, None)

    def can_run(self, spec: JobTrait) -> bool:
        """Whether ``spec`` is a SlurmJob with the same arguments and this job has not ended."""
        return (
            isinstance(spec, SlurmJob)
            and build_spec(spec._arguments) == build_spec(self._arguments)
            and (spec._login_name, spec._gateway_url) == (self._login_name, self._gateway_url)
            and self._is_running()
        )

    def _spec(self) -> dict[str, Any]:
        spec = build_spec(self._arguments).model_dump(mode="json", exclude_defaults=True)
        where = {"login": self._login_name, "gateway_url": self._gateway_url}
        return {"spec": spec, **where, "job_start_timeout": self._start_timeout}

    @classmethod
    def _restore(cls, spec: dict[str, Any], allocation: dict[str, Any] | None) -> Self:
        saved = SlurmSpec.model_validate(spec["spec"])
        where = {"login": spec["login"], "gateway_url": spec.get("gateway_url")}
        job = cls(saved.meshes, **where, job_start_timeout=spec["job_start_timeout"])
        job._arguments = saved.model_dump()
        if allocation is not None:
            job._job = RunningSlurmJob.model_validate(allocation)
        return job

    # --- the way to the cluster

    @property
    def _is_local(self) -> bool:
        return self._login_name is None and self._gateway_url is None

    def _open(self) -> Access:
        if self._access is None:
            self._access = self._find_access()
        return self._access

    def _find_access(self) -> Access:
        if self._surrounds():
            return LoginAccess(ThisMachine(), sys.executable)
        if self._gateway_url is not None:
            return UrlAccess(self._gateway_url)
        python: str = self._arguments["python_exe"]
        kind = NodeAccess if self._arguments["gateway_on"] == "node" else LoginAccess
        if self._login_name is not None:
            return kind(SshLogin(self._login_name), python)
        return kind(ThisMachine(), sys.executable if python == "python" else python)


def jobs_at(login: str | None) -> JobList:
    """The jobs of this user on the cluster of a login node, or of this machine. Raises JobError."""
    node: LoginNode = ThisMachine() if login is None else SshLogin(login)
    try:
        return list_jobs(node)
    finally:
        node.close()


def build_spec(arguments: Mapping[str, Any]) -> SlurmSpec:
    """The job that the arguments describe; None stands for an argument's default. Raises ValueError."""
    given = {name: value for name, value in arguments.items() if value is not None}
    slurm_args = given.get("slurm_args", ())
    if isinstance(slurm_args, str):
        raise TypeError(f"SlurmJob(slurm_args={slurm_args!r}): expected a list, such as ['--constraint=a100']")
    try:
        return SlurmSpec.model_validate({**given, "slurm_args": tuple(slurm_args)})
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_url=False):
            names = [str(part) for part in problem["loc"] if part != "[key]"]
            where = (names[0] if names else "") + "".join(f"[{name!r}]" for name in names[1:])
            value = "" if not names or isinstance(problem["input"], (dict, list, tuple)) else f"={problem['input']!r}"
            text = problem["msg"].removeprefix("Value error, ")
            lines.append(f"SlurmJob({where}{value}): {text}" if where else f"SlurmJob: {text}")
        raise ValueError("\n".join(lines)) from None


def refuse_direct_access(*, out_of_cluster: bool, attach_to: str | None, bind_to: str | None) -> None:
    """Monarch's arguments for drivers outside the cluster, which meshgate reaches by its gateway."""
    if out_of_cluster:
        raise ValueError("SlurmJob(out_of_cluster=True): the gateway is in the cluster; pass login= instead")
    if attach_to is not None:
        raise ValueError(f"SlurmJob(attach_to={attach_to!r}): the driver reaches no worker; pass login= instead")
    if bind_to is not None:
        raise ValueError(
            f"SlurmJob(bind_to={bind_to!r}): each worker listens on the address by which it reaches the gateway; "
            "remove the argument"
        )


class Silent(Block):
    """Shows one text at a time, as a context manager. This one shows nothing."""

    def show(self, text: str) -> None:
        return None


class Plain(Silent):
    """Prints each text once, until another follows."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._last = stream, ""

    def show(self, text: str) -> None:
        if text != self._last:
            self._last = text
            self._stream.write(f"{text}\n")
            self._stream.flush()


class Live(Silent):
    """One line on a terminal, with the time that has passed."""

    def __init__(self, console: Console) -> None:
        self._status = console.status("")
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()

    def show(self, text: str) -> None:
        self._status.update(Text(f"{text}  {time.monotonic() - self._started:.0f} s"))


def choose_progress(stream: TextIO | None = None) -> Silent:
    stream = stream or sys.stderr
    match progress_mode(stream):
        case "off":
            return Silent()
        case "plain":
            return Plain(stream)
        case "live":
            return Live(new_console(file=stream))


def describe(report: JobReport) -> str:
    """``Slurm job 12 is PENDING (Resources: waits for nodes to become free); expected to start at 14:05``."""
    text = f"Slurm job {report.job_id} is {report.state}"
    if report.why:
        text += f" ({report.why})"
    if report.expected_start is not None and report.expected_start > time.time():
        text += f"; expected to start at {_clock(report.expected_start)}"
    if not report.pending and not report.ended:
        text += f", {report.registered} of {report.nodes} workers are connected"
    return text


def wait_for_workers(
    ask: Callable[[], JobReport], progress: Silent, timeout: float | None, interval: float = 2.0
) -> JobReport:
    """Waits until every worker has connected. ``ask`` asks for the job, and raises OSError; at the latest every
    ``interval`` seconds while it is in the queue.

    Raises JobStartFailed if the job ends or its workers cannot start, or if that takes longer than ``timeout`` seconds.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    delay = FIRST_DELAY
    while True:
        try:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            report = ask_again_while_silent(lambda: _ask(ask), progress, left)
        except SlurmSilent as error:
            if deadline is None or time.monotonic() < deadline:
                raise
            raise JobStartFailed(f"{error}, and job_start_timeout={timeout:g} is over") from error
        if report.registered < report.nodes or delay != FIRST_DELAY:  # says nothing if there is nothing to wait for
            progress.show(describe(report))
        if report.failed is not None or report.ended:
            raise JobStartFailed(report.failed or f"Slurm job {report.job_id} has ended: {report.why}")
        if report.registered == report.nodes:
            return report
        if deadline is not None and time.monotonic() > deadline:
            raise JobStartFailed(f"{describe(report)}, after {timeout:g} s (job_start_timeout)")
        time.sleep(delay)  # between two questions
        delay = min(1.5 * delay, interval if report.pending else interval / 8)


def ask_again_while_silent(ask: Callable[[], T], progress: Silent, timeout: float | None) -> T:
    """Asks again while Slurm's controller does not answer, for ``SLURM_TIMEOUT`` seconds, or ``timeout`` if that is
    shorter; then raises SlurmSilent."""
    limit = SLURM_TIMEOUT if timeout is None else min(timeout, SLURM_TIMEOUT)
    started = time.monotonic()
    while True:
        try:
            return ask()
        except SlurmSilent as error:
            silent = time.monotonic() - started
            if silent >= limit:
                raise SlurmSilent(f"{error}. It has not answered for {silent:.0f} s") from error
            why = str(error).partition("\n")[0]
            progress.show(f"waiting for up to {limit:.0f} s until Slurm's controller answers: {why}")
        time.sleep(LONGEST_DELAY)


def _ask(ask: Callable[[], JobReport]) -> JobReport:
    """Asks again for a while after errors: the connection to the login node may have been cut."""
    deadline = time.monotonic() + GATEWAY_TIMEOUT
    delay = FIRST_DELAY
    while True:
        try:
            return ask()
        except SlurmSilent:
            raise
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(delay)
        delay = min(2 * delay, LONGEST_DELAY)


def _clock(when: float) -> str:
    local = time.localtime(when)
    return time.strftime("%H:%M" if when - time.time() < 12 * 3600 else "%a %d %b, %H:%M", local)


def second_interrupt(job_id: int, seconds: float = INTERRUPT_WINDOW) -> bool:
    """Says what becomes of the job, and returns whether another Ctrl-C follows."""
    try:
        sys.stderr.write(
            f"\nSlurm job {job_id} stays in the queue, and state() waits for it again. Ctrl-C within {seconds:g} s "
            "cancels it\n"
        )
        sys.stderr.flush()
        threading.Event().wait(seconds)
    except KeyboardInterrupt:
        return True
    return False
