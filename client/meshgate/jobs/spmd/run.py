"""One run of a script on the hosts of a job: all ranks are started, watched and ended, and started again if allowed."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from meshgate.errors import MeshgateError, SPMDFailed, StepFailedError, SupervisionError
from meshgate.jobs.spmd.failures import RankReport, failure_of
from meshgate.jobs.spmd.rank_actors import RankRunner, RankStopper
from meshgate.jobs.spmd.torchrun import ProgramKind, TorchrunCommand
from meshgate.proxies import HostMeshProxy, ProcMeshProxy


@dataclass(frozen=True, slots=True)
class Program:
    """What each rank runs. ``name`` is a path or a module; ``synced`` is the path in the synced project, and
    ``directory`` the working directory in it. ``wrapper`` starts the program: it gets the command as its arguments."""

    kind: ProgramKind
    name: str
    arguments: tuple[str, ...]
    synced: str | None = None
    directory: str = ""
    wrapper: tuple[str, ...] = ()


def run_command(hosts: HostMeshProxy, command: TorchrunCommand, program: Program, name: str | None = None) -> None:
    """Runs ``program`` on ``hosts``, in a process mesh ``name``; returns when every rank has ended with exit code 0.

    Raises SPMDFailed when a rank fails and no restart is left, and ValueError, before any rank starts, if the hosts
    cannot run the command.
    """
    count = command.nodes_of(len(hosts))
    if count < len(hosts):
        hosts = hosts.slice(hosts=slice(0, count))
    processes = _count_processes(hosts, command.processes)
    token = secrets.token_hex(4)
    for restart in range(command.max_restarts + 1):
        failure = _attempt(hosts, processes, command, program, restart, token, name or _mesh_name(command))
        if failure is None:
            return
        if restart == command.max_restarts:
            raise failure
        why = str(failure).removesuffix(f". Last output of rank {failure.rank}:\n{failure.log_tail}").splitlines()[0]
        _print(f"meshgate: {why}. Restart {restart + 1} of {command.max_restarts}")
        try:
            hosts.initialized.get()  # a lost host may be replaced
        except MeshgateError as error:
            raise failure from error


def _attempt(
    hosts: HostMeshProxy,
    processes: int,
    command: TorchrunCommand,
    program: Program,
    restart: int,
    token: str,
    name: str,
) -> SPMDFailed | None:
    """Starts all ranks in new processes and ends them. Returns why the run failed, or None."""
    procs = hosts.spawn_procs(per_host={"gpus": processes}, name=name)
    try:
        runners: Any = procs.spawn("runners", RankRunner)
        stoppers: Any = procs.spawn("stoppers", RankStopper)
        for mesh in (procs, runners, stoppers):
            mesh._client.handle_faults(mesh._object)  # a lost rank fails the run, not the program
        _raise_first(runners.check.call(asdict(program)).get().values())
        plan = _plan(command, program, restart, token, world=len(procs), local_world=processes)
        plan["master"] = _hold_master(runners, command, len(hosts))
        try:
            return failure_of([RankReport(**future.get()) for future in runners.run.stream(plan, stoppers)])
        except (KeyboardInterrupt, SystemExit):  # SIGTERM in a job's with block raises SystemExit
            _print(f"meshgate: the ranks got SIGTERM; waiting up to {command.shutdown_timeout} s for them to end")
            stoppers.end.call(command.shutdown_timeout).get()
            raise
    except (SupervisionError, StepFailedError) as error:
        return _lost(error)
    finally:
        _stop(procs)


def _plan(
    command: TorchrunCommand, program: Program, restart: int, token: str, *, world: int, local_world: int
) -> dict[str, Any]:
    """What ``RankRunner.run`` needs, in built-in types."""
    return {
        "program": asdict(program),
        "world": world,
        "local_world": local_world,
        "run_id": command.run_id,
        "token": token,
        "role": command.role,
        "restart": restart,
        "max_restarts": command.max_restarts,
        "virtual_local_rank": command.virtual_local_rank,
        "log_directory": command.log_directory,
        "redirects": command.redirects,
        "tee": command.tee,
        "shown_local_ranks": None if command.shown_local_ranks is None else sorted(command.shown_local_ranks),
        "shutdown_timeout": command.shutdown_timeout,
    }


def _count_processes(hosts: HostMeshProxy, wanted: int | str) -> int:
    """The number of processes on each host. Raises ValueError unless all hosts have the same number of devices."""
    if isinstance(wanted, int):
        return wanted
    procs = hosts.spawn_procs(name="devices")
    try:
        counter: Any = procs.spawn("devices", RankRunner)
        counts = list(counter.count_devices.call(wanted).get().values())
    finally:
        _stop(procs)
    option = f"torchrun --nproc-per-node={wanted}"
    for host, count, problem in counts:
        if problem or count < 1:
            raise ValueError(f"{option}: {host} {f'cannot count them: {problem}' if problem else 'has none'}")
    if len({count for _, count, _ in counts}) > 1:
        found = ", ".join(f"{host} has {count}" for host, count, _ in counts)
        raise ValueError(f"{option}: the hosts have different numbers ({found}); pass a number")
    return int(counts[0][1])


def _hold_master(runners: Any, command: TorchrunCommand, hosts: int) -> tuple[str, int]:
    first = runners.slice(**dict.fromkeys(runners.extent.labels, 0))
    address, port, problem = first.hold_port.call_one(command.master_address, command.master_port, hosts).get()
    if problem:
        raise ValueError(f"no rank was started: {problem}")
    return address, port


def _raise_first(problems: Iterable[str]) -> None:
    for problem in problems:
        if problem:
            raise ValueError(f"no rank was started: {problem}")


def _lost(error: SupervisionError | StepFailedError) -> SPMDFailed:
    """The error of a run that lost a process or a host."""
    failure = error.failure if isinstance(error, SupervisionError) else None
    rank = failure.ranks[0] if failure and failure.ranks else None
    host = failure.hosts.get(rank, "") if failure and rank is not None else ""
    if failure is not None and rank is not None:
        message = f"rank {rank} on {host} was lost: {failure.reason}"
    else:
        message = f"the run was ended: {error}"
    lost = SPMDFailed(message, rank=rank, host=host)
    lost.__cause__ = error
    return lost


def _stop(procs: ProcMeshProxy) -> None:
    try:
        procs.stop("the run has ended").get()
    except (SupervisionError, StepFailedError):
        return  # they have died, which is what the caller reports


def _mesh_name(command: TorchrunCommand) -> str:
    return command.role if command.role != "default" else "spmd"


def _print(line: str) -> None:
    print(line, file=sys.stderr)  # noqa: T201 - for the user's terminal
