"""``python -m meshgate_slurm.batch COMMAND``: the client of a batch job, on the first node of its allocation.

Starts a gateway on this node, whose workers are a step of the allocation, and then the command, whose ``SlurmJob``
finds them. The job ends with the command, and with its exit code.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from meshgate_slurm import login
from meshgate_slurm.messages import JOB_FILE, Rejected
from meshgate_slurm.script import ALLOCATION, SPEC
from meshgate_slurm.spec import SlurmSpec

__all__ = ["main"]

COMMAND_NOT_FOUND = 127


def main() -> None:
    spec = SlurmSpec.model_validate_json(os.environ.pop(SPEC))
    number = os.environ["SLURM_JOB_ID"]
    with tempfile.TemporaryDirectory(prefix="meshgate-") as temporary:
        os.environ[ALLOCATION] = number
        job = login.start_gateway(Path(temporary) / "job", f"{int(number):08}", spec)
        del os.environ[ALLOCATION]
        if isinstance(job, Rejected):
            raise SystemExit(f"{job.error}\n{job.output}".strip())
        try:
            description = Path(job.directory) / "job.json"
            login.write_private(description, job.model_dump_json())
            code = _run(shlex.split(sys.argv[1]), {JOB_FILE: str(description)})
        finally:
            login.end_gateway(job)
    sys.exit(code)


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
