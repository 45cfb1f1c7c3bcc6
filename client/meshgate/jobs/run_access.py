"""What a job offers of the programs that run beside its gateway: ``job.submit()``, ``runs()`` and ``run()``.

``JobTrait`` inherits these methods. ``runs`` has what they do, and is imported once a program uses them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from meshgate.errors import JobNotRunning

if TYPE_CHECKING:
    from meshgate.code_sync.push import SyncReport
    from meshgate.jobs.runs import Run
    from meshgate.jobs.state import JobState
    from meshgate.session.dialing import Dialer
    from meshgate.session.session import ClientSession
    from meshgate_wire.status import JoinableJob, RunOutput


class RunAccess(ABC):
    """What a job offers of the programs that run beside its gateway."""

    @property
    @abstractmethod
    def _running(self) -> RunAccess | None: ...

    @abstractmethod
    def _dialer(self) -> Dialer: ...

    @abstractmethod
    def state(self) -> JobState: ...

    @abstractmethod
    def sync(self, *, sync_dirs: Sequence[str] | None = None, quiet: bool = False) -> SyncReport: ...

    @abstractmethod
    def _joinable(self) -> JoinableJob:
        """What this job is to a program that runs in it. For job types."""

    def submit(
        self,
        command: Sequence[str],
        name: str | None = None,
        *,
        env: Mapping[str, str] | None = None,
        restarts: int = 0,
        memory: int | None = None,
        processes: int | None = None,
        disk: int | None = None,
        sync_dirs: Sequence[str] | None = None,
    ) -> Run:
        """Runs ``command`` beside the job's gateway, from the code as it is now, and returns at once.

        The program goes on when this process ends, until it ends itself, is stopped, or the job ends. Its output and
        exit code stay until the job ends, which it does after its idle timeout once the run has ended. It runs in a
        copy of the synced project (``sync_dirs``, as in ``sync``), in the same directory as this process; ``env`` is
        added to its environment. In it, a job that is this one attaches to this one. ``name`` is for people, and is
        free again once its run has ended. The program is started again up to ``restarts`` times if it fails.
        ``memory`` and ``disk`` (bytes) and ``processes`` limit all its processes together; the defaults are half of
        the machine's or container's memory, 4 GB and 4096. Applies the job if it does not run. A cut connection starts
        nothing twice. Raises ValueError if the command cannot run there or a run of this name has not ended,
        ConnectionFailedError if the gateway cannot be reached for two minutes, and what ``sync`` raises.
        """
        from meshgate.code_sync.session_sync import sync_for  # noqa: PLC0415 - few programs submit others
        from meshgate.jobs.runs import program_of, submit  # noqa: PLC0415
        from meshgate.progress import Waiting  # noqa: PLC0415

        if isinstance(command, str) or not command:
            raise TypeError(f"submit({command!r}): pass the program and its arguments, such as ['python', 'train.py']")
        limits = {"restarts": restarts, "memory": memory, "processes": processes, "disk": disk}
        program = program_of(command, name, environment=env or {}, **limits)
        self.state()
        running = self._require_runs()
        title, step = " ".join(map(str, command))[:80], "the job gets its code"
        with Waiting(lambda: f"submitting {title}: {step}"):
            report = self.sync(sync_dirs=sync_dirs, quiet=True)
            client: ClientSession = running._client  # type: ignore[attr-defined]
            tree = sync_for(client, None).tree
            step = "the gateway starts it"
            return submit(running._dialer, tree, report.version, program, self._joinable())

    def runs(self) -> list[Run]:
        """The runs of the running job, the oldest first. Raises GatewayError, and JobNotRunning before ``state()``."""
        from meshgate.jobs.runs import list_runs  # noqa: PLC0415

        return list_runs(self._require_runs()._dialer())

    def run(self, name: str) -> Run:
        """The run called ``name``. Raises as its methods, and JobNotRunning before ``state()``."""
        run = self._run(name)
        run.status()
        return run

    def _run_output(self, name: str, after: int) -> RunOutput:
        """What the run printed from byte ``after`` on, at most 1 MiB of it."""
        return self._run(name).output(after)

    def _run(self, name: str) -> Run:
        from meshgate.jobs.runs import Run  # noqa: PLC0415

        return Run(name, self._require_runs()._dialer())

    def _require_runs(self) -> RunAccess:
        running = self._running
        if running is None:
            raise JobNotRunning(f"{self!r} is not running: call state() first")
        return running
