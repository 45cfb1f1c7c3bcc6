"""The jobs that a user has submitted, in files on the cluster, by which another machine of the user finds them.

There is one file for each job, ``jobs/<cluster>/<number>.json``, with what it takes to use or end the job. Clusters may
share a home directory, and number their jobs alike: each sees its own. A file contains the job's token, so only its
owner can read it. Killing the job removes the file, and so does ``list_jobs`` once Slurm has ended the job. A job that
Slurm does not know may be that of another cluster with the same name, so its file stays for a while. Later submissions
remove old files, too. ``python`` runs the Python of the last submission, since a machine that looks for jobs does not
know any.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from meshgate_slurm import commands
from meshgate_slurm.messages import PYTHON_FILE, JobList, JobReport, ListedJob, RecordedJob, RunningSlurmJob
from meshgate_slurm.spec import SlurmSpec

JOBS = "~/.meshgate/slurm/jobs"
UNKNOWN_FOR = 30 * 86400.0  # seconds since the submission; longer than jobs may be in the queue and run


def record_job(job: RunningSlurmJob, spec: SlurmSpec, cluster: str) -> None:
    """Records the job without the environment of its workers, which may have secrets and is not needed to use the job.
    Raises OSError."""
    python = sys.executable  # which other machines run on the login node
    record = RecordedJob(created=time.time(), job=job, spec=spec.model_copy(update={"env": {}, "python_exe": python}))
    _replace(_file(job.job_id, cluster), record.model_dump_json(), 0o600)
    _replace(Path(PYTHON_FILE).expanduser(), f'#!/bin/sh\nexec {shlex.quote(python)} "$@"\n', 0o700)
    with contextlib.suppress(commands.SlurmError, OSError):  # the job is recorded
        _forget_old(cluster)


def forget_job(job_id: int) -> None:
    """Raises SlurmError and OSError."""
    _file(job_id, commands.cluster_name()).unlink(missing_ok=True)


def list_jobs() -> JobList:
    """The recorded jobs of this cluster that have not ended, oldest first. Raises SlurmError and OSError."""
    cluster = commands.cluster_name()
    records, unreadable = dict(_read_records(cluster)), []
    known = commands.jobs(records) if records else {}
    found = []
    for number, record in records.items():
        status = known.get(number)
        if status is None and not _is_old(_file(number, cluster)):
            continue
        if status is None or status.ended:
            _file(number, cluster).unlink(missing_ok=True)
        elif record is None:
            unreadable.append(number)
        else:
            report = JobReport.of(status, record.spec.nodes)
            found.append(ListedJob(job=record.job, spec=record.spec, report=report, age=time.time() - record.created))
    found.sort(key=lambda listed: listed.job.job_id)
    return JobList(jobs=tuple(found), unreadable=tuple(sorted(unreadable)))


def _forget_old(cluster: str) -> None:
    """Removes the old records of jobs that have ended. Raises SlurmError and OSError."""
    old = [number for path, number in _files(cluster) if _is_old(path)]
    known = commands.jobs(old) if old else {}
    for number in old:
        if number not in known or known[number].ended:
            _file(number, cluster).unlink(missing_ok=True)


def _is_old(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime >= UNKNOWN_FOR
    except FileNotFoundError:  # another program has removed it
        return False


def _read_records(cluster: str) -> Iterator[tuple[int, RecordedJob | None]]:
    """The recorded jobs by number; None if another version of meshgate has recorded it."""
    for path, number in _files(cluster):
        with contextlib.suppress(FileNotFoundError):  # another program has removed it
            data = path.read_bytes()
            try:
                yield number, RecordedJob.model_validate_json(data)
            except ValidationError:
                yield number, None


def _files(cluster: str) -> list[tuple[Path, int]]:
    """The records, with the numbers of their jobs. Other files may lie beside them."""
    found = (Path(JOBS).expanduser() / cluster).glob("*.json")
    return [(path, int(path.stem)) for path in found if path.stem.isdecimal()]


def _file(job_id: int, cluster: str) -> Path:
    return Path(JOBS).expanduser() / cluster / f"{job_id}.json"


def _replace(path: Path, text: str, mode: int) -> None:
    """Writes the file at once with its content: other programs may be reading it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(descriptor, mode)
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
