"""``python -m meshgate_slurm.batch [COMMAND]``: what a job with its gateway on its first node runs there.

Starts a gateway on this node, whose workers are a step of the allocation. With a command, the client of a batch job,
runs that, whose ``SlurmJob`` finds the gateway; the job ends with the command, and with its exit code. Without one, the
gateway is for clients elsewhere, which learn its address by a file, and the job ends with the gateway.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from meshgate_slurm.commands import SlurmError
from meshgate_slurm.gateway_process import (
    end_gateway,
    gateway_output,
    own_address,
    remove_files,
    start_gateway,
    start_process,
    write_private,
)
from meshgate_slurm.messages import ADDRESS_FILE, JOB_FILE, GatewayAddress, Rejected
from meshgate_slurm.script import ALLOCATION, DIRECTORY, SPEC
from meshgate_slurm.spec import SlurmSpec

COMMAND_NOT_FOUND = 127


def main() -> None:
    spec = SlurmSpec.model_validate_json(os.environ.pop(SPEC))
    if len(sys.argv) == 1:
        sys.exit(_serve(spec, Path(os.environ.pop(DIRECTORY))))
    number = os.environ["SLURM_JOB_ID"]
    signal.signal(signal.SIGTERM, _end)
    with tempfile.TemporaryDirectory(prefix="meshgate-") as temporary:
        os.environ[ALLOCATION] = number
        job = start_gateway(Path(temporary) / "job", f"{int(number):08}", spec)
        del os.environ[ALLOCATION]
        if isinstance(job, Rejected):
            raise SystemExit(f"{job.error}\n{job.output}".strip())
        try:
            description = Path(job.directory) / "job.json"
            here = job.model_copy(update={"cluster": os.environ.get("SLURM_CLUSTER_NAME", "")})
            write_private(description, here.model_dump_json())
            command = [os.path.expanduser(each) if each[:2] == "~/" else each for each in shlex.split(sys.argv[1])]
            code = _run(command, {JOB_FILE: str(description)})
        finally:
            end_gateway(job)
    sys.exit(code)


def _end(signum: int, frame: object) -> None:
    """Slurm ends the job, with SIGKILL to follow: the gateway and its files on this node must end before that."""
    signal.signal(signum, signal.SIG_IGN)  # a second one must not interrupt that
    raise SystemExit(128 + signum)


def _serve(spec: SlurmSpec, directory: Path) -> int:
    """Runs a gateway for clients elsewhere. Returns its exit code."""
    if not directory.is_dir():
        raise SystemExit(f"{os.uname().nodename} has no {directory}: the login node and the nodes must share it")
    # Slurm ends a job with SIGTERM to all of its processes. The gateway stays a moment longer, to say why.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    os.environ[ALLOCATION] = os.environ["SLURM_JOB_ID"]
    try:
        process, report = start_process(directory, spec, ["--host", own_address(spec.partition)])
        if isinstance(report, Rejected):
            raise SystemExit(f"{report.error}\n{report.output}".strip())
        address = GatewayAddress(address=report.url.partition("//")[2])
        write_private(directory / "address", address.model_dump_json())
        os.rename(directory / "address", directory / ADDRESS_FILE)  # at once with its content
        code = process.wait()
        if code != 0:
            print(gateway_output(directory), file=sys.stderr)  # noqa: T201 - the job's log
        return code
    except (SlurmError, OSError) as error:
        raise SystemExit(f"cannot start a gateway on {os.uname().nodename}: {error}") from None
    finally:
        remove_files(directory)


def _run(command: list[str], variables: Mapping[str, str]) -> int:
    """Runs the command, to which ``python`` is this one. Returns its exit code, as a shell's."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    try:
        code = subprocess.call(command, env={**os.environ, "PATH": path, **variables})
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)  # noqa: T201 - the job's log
        return COMMAND_NOT_FOUND
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    main()
