"""``serve`` and ``SPMDJob``: a torchrun command on the hosts of any job."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from meshgate.code_sync.session_sync import sync_for
from meshgate.errors import JobNotRunning, JobUnsupported
from meshgate.jobs.process import LocalGatewayJob, LocalJob
from meshgate.jobs.saved import DEFAULT_JOB_PATH, SavedJob
from meshgate.jobs.spmd.run import find_program, local_file, require_program, run_command
from meshgate.jobs.spmd.schedulers import TorchXJob, job_of, read_appdef
from meshgate.jobs.spmd.torchrun import parse_command
from meshgate.jobs.state import JobState
from meshgate.jobs.trait import JobTrait, job_loads
from meshgate.proxies import HostMeshProxy

if TYPE_CHECKING:
    from meshgate.proxies.attached import AttachedSession
    from meshgate.session.dialing import Dialer
    from meshgate_wire.status import JoinableJob

DEFAULT_SCHEDULER = "mast_conda"  # Monarch's


class SPMDJob(JobTrait):
    """A job whose hosts run a script, as torchrun does. ``serve`` makes it.

    It starts, finds and ends ``job``, which may be of any type. ``mesh`` names the host mesh of the ranks; it may be
    omitted if the job has one.
    """

    def __init__(
        self,
        job: JobTrait,
        command: Sequence[str],
        mesh: str | None = None,
        *,
        wrapper: Sequence[str] = (),
        workspace: str | None = None,
        name: str | None = None,
    ) -> None:
        """``wrapper`` starts each rank: it gets the rank's command as its arguments. ``workspace`` is the directory
        that the command runs in and that is synced (default: the working directory, and its project). ``name`` is that
        of the ranks' process mesh."""
        super().__init__()
        self._job = job
        self._detached = job._detached
        self._arguments = list(command)
        self._command = parse_command(command)
        self._mesh = mesh
        self._wrapper, self._workspace, self._name = tuple(wrapper), workspace, name

    def __repr__(self) -> str:
        return f"SPMDJob({self._arguments}, job={self._job!r})"

    def run_spmd(self) -> None:
        """Runs the script on every rank, in new processes, and returns when all have ended with exit code 0.

        Takes the files as they are now: code that the job syncs is pushed first. When a rank fails, the others are
        ended, and all are started again up to ``--max-restarts`` times; then SPMDFailed is raised. Ctrl-C ends the
        ranks, and the job keeps running. Raises ValueError or FileNotFoundError, before any rank starts, if the command
        does not fit the hosts or the script is missing.
        """
        directory = self._workspace or os.getcwd()
        hosts = self._hosts(self.state(cached_path=None))
        job = self._running or self
        client = job._client
        assert client is not None
        if client.code_version is not None or self._needs_sync(directory):
            job.sync(quiet=True, sync_dirs=[self._workspace] if self._workspace is not None else None)
        tree = sync_for(client, None).tree if client.code_version is not None else None
        program = find_program(self._command, directory, tree)
        run_command(hosts, self._command, replace(program, wrapper=self._wrapper), self._name)

    def _hosts(self, state: JobState) -> HostMeshProxy:
        return state._hosts[self._choose_mesh(state._hosts)]

    def _choose_mesh(self, names: Iterable[str]) -> str:
        """The mesh of the ranks, one of ``names``. Raises ValueError."""
        known = sorted(names)
        if self._mesh is None and len(known) > 1:
            raise ValueError(f"the job has several meshes; choose one with mesh=…: {', '.join(known)}")
        if self._mesh is not None and self._mesh not in known:
            raise ValueError(f"mesh={self._mesh!r}: the job has no such mesh; its meshes are: {', '.join(known)}")
        return self._mesh or known[0]

    def _needs_sync(self, directory: str) -> bool:
        """Whether the script is on this machine, and the hosts are on others."""
        if isinstance(self._job, TorchXJob):
            shares_files = self._job.shares_files
        else:
            shares_files = isinstance(self._job, LocalGatewayJob)
        return local_file(self._command, directory) is not None and not shares_files

    # --- implementation of JobTrait

    def state(self, cached_path: str | None = DEFAULT_JOB_PATH, *, wait: bool | float = False) -> JobState:
        """The job's host meshes. A job that ends with this process is not saved in ``cached_path``."""
        return super().state(None if self._ends_here else cached_path, wait=wait)

    @property
    def _ends_here(self) -> bool:
        """Whether the hosts always end with this process."""
        return isinstance(self._job, (LocalJob, TorchXJob))

    def detach(self, name: str | None = None, cached_path: str | None = DEFAULT_JOB_PATH) -> str:
        """As of the job inside. Raises JobUnsupported if that always ends with this process."""
        if self._ends_here:
            raise JobUnsupported(f"the hosts of {self!r} end with this process, so that it cannot be detached")
        return super().detach(name, cached_path)

    def __enter__(self) -> Self:
        self._job.__enter__()
        return super().__enter__()

    def _leave_block(self) -> None:
        super()._leave_block()
        self._job._leave_block()

    @property
    def _inner(self) -> JobTrait:
        """The job inside, or the one that it found: it has the session."""
        return self._job._running or self._job

    @property
    def _ends_when_killed(self) -> bool:
        return self._inner._ends_when_killed

    def _dialer(self) -> Dialer:
        return self._inner._dialer()

    def _mesh_sizes(self) -> Mapping[str, int]:
        return self._inner._mesh_sizes()

    def _joinable(self) -> JoinableJob:
        return self._job._joinable()

    def _take_over(self, name: str | None, *, replay: bool) -> AttachedSession:
        session = self._inner._take_over(name, replay=replay)
        self._take_session()
        return session

    def _take_session(self) -> None:
        self._client, self._attached = self._inner._client, self._inner._attached

    def can_run(self, spec: JobTrait) -> bool:
        """Whether ``spec`` is an SPMDJob with the same command, whose job this one's job can run."""
        return isinstance(spec, SPMDJob) and spec._identity == self._identity and self._job.can_run(spec._job)

    @property
    def _identity(self) -> tuple[Any, ...]:
        return self._arguments, self._mesh, self._wrapper, self._workspace

    def _create(self, client_script: str | None) -> None:
        if (names := self._job._mesh_names()) is not None:
            self._choose_mesh(names)
        self._job.apply(client_script)
        self._apply_id = self._job.apply_id  # by which other processes find the allocation

    def _mesh_names(self) -> Collection[str] | None:
        return self._job._mesh_names()

    def _state(self) -> JobState:
        self._job._detached = self._inner._detached = self._detached
        state = self._job.state(cached_path=None)
        self._take_session()
        return state

    def _kill(self) -> None:
        self._client = None
        self._job.kill()

    def _is_running(self) -> bool:
        running = self._job._running
        return running is not None and running._is_running()

    def _outlive_driver(self) -> None:
        self._job._scoped = False  # it entered the block with this one
        self._job._detach()

    def _spec(self) -> dict[str, Any]:
        saved = self._job._saved()
        return {
            "kind": saved.kind,
            "spec": saved.spec,
            "own": saved.own,
            "command": self._arguments,
            "mesh": self._mesh,
            "wrapper": list(self._wrapper),
            "workspace": self._workspace,
            "name": self._name,
        }

    def _allocation(self) -> dict[str, Any]:
        saved = self._job._saved()
        if saved.allocation is None:
            raise JobNotRunning(f"{self!r} is not running")
        return {"apply_id": saved.apply_id, "allocation": saved.allocation}

    @classmethod
    def _restore(cls, spec: dict[str, Any], allocation: dict[str, Any] | None) -> Self:
        saved = SavedJob(kind=spec["kind"], spec=spec["spec"], own=spec.get("own"), **(allocation or {}))
        job = job_loads(saved.to_bytes())
        options = {option: spec.get(option) for option in ("workspace", "name")}
        return cls(job, spec["command"], spec["mesh"], wrapper=spec["wrapper"], **options)


def serve(
    appdef: Any,
    scheduler: str = DEFAULT_SCHEDULER,
    scheduler_cfg: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
    job: JobTrait | None = None,
    mesh: str | None = None,
) -> SPMDJob:
    """Starts the hosts for a torchrun command; ``run_spmd()`` of the result runs it.

    ``appdef`` is a command such as ``["torchrun", "--nproc-per-node=4", "train.py"]``, or a torchx ``AppDef`` with one
    role that runs such a command. The hosts are those of ``job``, of any type, and of its mesh ``mesh`` if it has
    several; or of a new job on the torchx scheduler ``scheduler``, one for each replica of the role. ``name`` names
    the ranks' process mesh and, with Slurm and Kubernetes, the new job; an ``AppDef`` has its own. Raises ValueError,
    TypeError or FileNotFoundError, before anything starts, if the command or the scheduler is invalid or the script is
    missing, and JobStartFailed if the hosts do not start.
    """
    is_list = isinstance(appdef, (list, tuple, str))
    if not is_list and name is not None:
        raise ValueError("name is only supported for command lists; set AppDef.name instead")
    role = None if is_list else read_appdef(appdef)
    arguments = list(role.command) if role is not None else appdef
    command = parse_command(arguments)
    if role is None:
        require_program(command, os.getcwd())
    elif command.nodes is not None:
        command.nodes_of(role.replicas)  # raises if --nnodes wants more
    if job is None:
        job = job_of(scheduler, scheduler_cfg or {}, command, appdef, role, name)
    else:
        _refuse_scheduler(scheduler, scheduler_cfg)
    # What torchx starts is started by the entrypoint; elsewhere the entrypoint starts each rank.
    wrapper = role.wrapper if role is not None and not isinstance(job, TorchXJob) else ()
    workspace = role.workspace if role is not None else None
    spmd = SPMDJob(job, arguments, mesh, wrapper=wrapper, workspace=workspace, name=name)
    spmd.apply()
    return spmd


def _refuse_scheduler(scheduler: str, scheduler_cfg: Mapping[str, Any] | None) -> None:
    if scheduler != DEFAULT_SCHEDULER:
        raise ValueError(
            f"serve(job=…, scheduler={scheduler!r}): the hosts are either those of the job or of a new one"
        )
    if scheduler_cfg:
        raise ValueError("serve(job=…) takes no scheduler_cfg: configure the job")
