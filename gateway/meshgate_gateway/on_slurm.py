"""Connects a gateway to the Slurm job that it submits, watches and, at its own end, cancels.

The gateway of a batch job runs in the job itself: its workers are a step, and the job ends with its client.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path

from meshgate_gateway.hosts.slurm import SlurmHosts
from meshgate_gateway.supervisor.link import SupervisorLink
from meshgate_slurm import commands
from meshgate_slurm.commands import SlurmError, Unanswered
from meshgate_slurm.gateway_process import make_log_directory, own_address
from meshgate_slurm.script import ALLOCATION, Connect, batch_log, batch_script, log_directory, log_pattern, step
from meshgate_slurm.spec import SlurmSpec
from meshgate_slurm.status import JobStatus, read_end

__all__ = ["SlurmError", "SlurmJob", "Unanswered"]

KEPT = "slurm job"  # the key of what the supervisor keeps of it


class SlurmJob:
    """The job of this gateway. ``address`` is the one at which nodes reach this machine.

    A further server of the gateway takes the job, its listener and its workers' connections from the supervisor.
    """

    def __init__(self, spec: SlurmSpec, address: str, supervisor: SupervisorLink) -> None:
        self.spec, self.address, self._supervisor = spec, address, supervisor
        self.log_dir = log_directory(spec)
        self.job_id = 0
        self.within = os.environ.get(ALLOCATION)  # the number of the job in which this gateway runs, if any
        self._step: subprocess.Popen[bytes] | None = None

    @classmethod
    def find(cls, path: Path, supervisor: SupervisorLink) -> SlurmJob:
        """The job that the file describes. Blocks. Raises SlurmError."""
        if kept := supervisor.kept.get(KEPT):
            return cls(SlurmSpec.model_validate_json(kept.note["spec"]), kept.note["address"], supervisor)
        spec = commands.with_share(SlurmSpec.model_validate_json(path.read_bytes()))
        return cls(spec, own_address(spec.partition), supervisor)

    async def hosts(self) -> SlurmHosts:
        """Listens for workers, submits the job and returns its hosts. Raises SlurmError if Slurm refuses the job."""
        if kept := self._supervisor.kept.get(KEPT):
            listener, secret = socket.socket(fileno=kept.descriptors[0]), kept.note["secret"]
            self.job_id = kept.note["job_id"]
        else:
            listener, secret = await self._submit()
        hosts = SlurmHosts(self.spec, self.job_id, self, secret, self._supervisor)
        await hosts.workers.listen(listener)
        return hosts

    async def _submit(self) -> tuple[socket.socket, str]:
        secret = secrets.token_urlsafe(32)
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        listener = socket.create_server((self.address, 0), family=family, backlog=1024)
        try:
            port = listener.getsockname()[1]
            host = f"[{self.address}]" if ":" in self.address else self.address
            self.job_id = await asyncio.to_thread(self._start_workers, Connect([f"{host}:{port}"], secret))
        except BaseException:
            listener.close()
            raise
        facts = {"spec": self.spec.model_dump_json(), "address": self.address, "job_id": self.job_id, "secret": secret}
        self._supervisor.keep(KEPT, facts, [listener.fileno()])
        return listener, secret

    def _start_workers(self, connect: Connect) -> int:
        """Returns the number of their job."""
        make_log_directory(self.spec)
        if self.within is not None:
            self.job_id = int(self.within)
            command = step(self.spec, sys.executable, self.log_dir)
            self._step = commands.start_step(command, connect.variables(self.spec), self.batch_log)
            return self.job_id
        return commands.submit(
            batch_script(self.spec, sys.executable, self.log_dir, connect), directory=str(Path.home())
        )

    # --- the ``Cluster`` of SlurmHosts

    def status(self) -> JobStatus | None:
        return commands.jobs([self.job_id]).get(self.job_id)

    def node_state(self, node: str) -> str:
        return commands.node_state(node)

    def cancel(self) -> None:
        if self.within is None:  # else the job ends with its client, and its workers with this gateway
            commands.cancel(self.job_id)

    def log_tail(self, node: str | None) -> str:
        return read_end(
            self.batch_log if node is None else log_pattern(self.spec, self.log_dir, str(self.job_id), node)
        )

    @property
    def batch_log(self) -> str:
        path = batch_log(self.spec, self.log_dir, str(self.job_id))
        return path if self.within is None else f"{path.removesuffix('.log')}.srun.log"  # the first is the client's
