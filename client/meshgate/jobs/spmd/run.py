"""One run of a script on the hosts of a job: all ranks are started, watched and ended, and started again if allowed.

What a failed run raises is made of the reports of its ranks, and the program is found before any rank starts.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshgate.code_sync.project import Tree, relative_to
from meshgate.errors import MeshgateError, SPMDFailed, StepFailedError, SupervisionError, ranks_text
from meshgate.jobs.spmd.rank_actors import RankRunner, RankStopper
from meshgate.jobs.spmd.torchrun import ProgramKind, TorchrunCommand
from meshgate.proxies import HostMeshProxy, ProcMeshProxy
from meshgate_processes.identity import exit_text

TAIL_LINES = 30
TRACEBACK = re.compile(r"^Traceback \(most recent call last\):$", re.MULTILINE)
RANK_PREFIX = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)  # torch puts it before lines of a traceback
CONSEQUENCE = re.compile(r"connection (closed|reset|refused)|broken pipe|remote process exited", re.IGNORECASE)
EXCEPTION_LINE = re.compile(r"^[A-Za-z_][\w.]*(: .*)?$")


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
            with contextlib.suppress(SupervisionError, StepFailedError):  # a rank was lost: still an interrupt
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
    procs = hosts.spawn_procs(name="meshgate_devices")
    try:
        counter: Any = procs.spawn("meshgate_devices", RankRunner)
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


@dataclass(frozen=True, slots=True)
class RankReport:
    """How the script of a rank ended. ``code`` is None if it was never started, for which ``error`` may have the
    reason; ``stopped``: another rank, or the laptop, ended it."""

    rank: int
    host: str
    code: int | None
    stopped: bool
    tail: str
    error: str
    logs: str

    @property
    def failed(self) -> bool:
        """Whether the script failed by itself."""
        return not self.stopped and self.code != 0

    @property
    def exception(self) -> str:
        """The line that names the exception, or ""."""
        return self.error.strip().partition("\n")[0] or exception_of(self.tail)


def failure_of(reports: Sequence[RankReport]) -> SPMDFailed | None:
    """The error of a run, of which ``reports`` arrived in this order; None if every rank succeeded."""
    bad = [report for report in reports if report.code != 0]
    if not bad:
        return None
    first = min(bad, key=_precedence)  # the first to arrive among equals
    exception = first.exception
    tail = "\n".join(first.tail.rstrip().splitlines()[-TAIL_LINES:])
    parts = [f"rank {first.rank} on {first.host} {_ending(first.code)}{f': {exception}' if exception else ''}"]
    if others := _others(reports, first):
        parts.append(others)
    if first.logs:
        parts.append(f"log files on {first.host}: {first.logs}")
    message = ". ".join(parts)
    return SPMDFailed(
        f"{message}. Last output of rank {first.rank}:\n{tail}" if tail else message,
        rank=first.rank,
        host=first.host,
        exit_code=first.code,
        exception=exception,
        log_tail=tail,
        exit_codes={report.rank: report.code for report in reports},
    )


def _precedence(report: RankReport) -> int:
    """Ranks that only lost the connection to another one are not the cause. The cause may be ended by their failure
    while it is still exiting."""
    is_consequence = CONSEQUENCE.search(report.exception) is not None
    if report.failed and not is_consequence:
        return 0
    if report.exception and not is_consequence:
        return 1
    return 2 if report.failed else 3


def exception_of(output: str) -> str:
    """The last line of the last traceback in ``output``, which names the exception, or ""."""
    output = RANK_PREFIX.sub("", output)
    headers = list(TRACEBACK.finditer(output))
    if not headers:
        return ""
    for line in output[headers[-1].end() :].splitlines():
        if EXCEPTION_LINE.match(line):
            return line
    return ""


def _ending(code: int | None) -> str:
    if code is None:
        return "was not started"
    text = exit_text(code, exited="failed with exit code")
    memory = ", which is how the kernel ends a process if the host or job is out of memory"
    return text + memory if code == -signal.SIGKILL else text


def _others(reports: Sequence[RankReport], first: RankReport) -> str:
    others = [report for report in reports if report.rank != first.rank]  # the first may have been stopped as it ended
    groups: Mapping[str, list[int]] = {
        "failed too": [report.rank for report in others if report.failed],
        "ended by this failure": [report.rank for report in others if report.stopped and report.code != 0],
    }
    return "; ".join(f"{ranks_text(ranks)} {what}" for what, ranks in groups.items() if ranks)


def local_file(command: TorchrunCommand, directory: str) -> str | None:
    """The file on this machine that the command names, by its absolute path; None if it names something else."""
    if command.kind == "module" or (command.kind == "executable" and "/" not in command.program):
        return None
    path = os.path.join(directory, os.path.expanduser(command.program))
    return os.path.abspath(path) if os.path.isfile(path) else None


def require_program(command: TorchrunCommand, directory: str) -> None:
    """Raises FileNotFoundError if the command names a file by a relative path, and it does not exist here.

    Files with absolute paths may exist on the workers only, and so may modules and programs; each worker checks them.
    """
    if command.kind == "module" or os.path.isabs(os.path.expanduser(command.program)):
        return
    if command.kind == "executable" and "/" not in command.program:
        return
    if local_file(command, directory) is None:
        is_directory = os.path.isdir(os.path.join(directory, os.path.expanduser(command.program)))
        problem = "is a directory" if is_directory else "does not exist"
        raise FileNotFoundError(
            f"the script {command.program} {problem} in {directory}. Run the program where it does, or pass its "
            "absolute path; for a module, use -m"
        )


def find_program(command: TorchrunCommand, directory: str, tree: Tree | None) -> Program:
    """What each rank runs. ``tree`` is what is synced, None if no code is.

    Raises ValueError if the file exists here and is not synced, so that workers would not have it.
    """
    file = local_file(command, directory)
    if tree is None:
        return Program(command.kind, file or command.program, command.arguments)
    place = tree.place(Path(directory).resolve()) or ""
    if file is None:
        return Program(command.kind, command.program, command.arguments, directory=place)
    path = Path(file).resolve()
    if not tree.has(path):
        raise ValueError(f"{file} is outside of the synced project {tree}: move it there, or name it in sync_dirs")
    return Program(command.kind, file, command.arguments, relative_to(path, tree.top), place)
