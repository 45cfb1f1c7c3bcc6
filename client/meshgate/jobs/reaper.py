"""A child process that ends a job if this process is killed before it has done so.

The child holds the reading end of a pipe whose other end only this process has, and which the kernel closes however
this process ends. Until then it is a bare interpreter that waits. It runs in its own session, so that a Ctrl-C in the
terminal, or its end, does not reach it. It does not survive what kills a whole container or machine; for that, jobs
have an idle timeout.
"""

from __future__ import annotations

import base64
import contextlib
import os
import subprocess
import sys
import time

from meshgate.code_sync.project import driver_import_paths
from meshgate.errors import MeshgateError
from meshgate.jobs import registry
from meshgate.jobs.trait import job_loads

# The last line names the job to end; an empty one, none. The line contains a token, so it is passed on by a pipe.
_WAIT = """\
import os, sys
lines = sys.stdin.buffer.read().split(b"\\n")
if len(lines) < 2 or not lines[-2]:
    sys.exit()
reading, writing = os.pipe()
os.write(writing, lines[-2])
os.close(writing)
os.dup2(reading, 0)
os.execv(sys.executable, [sys.executable, "-m", "meshgate.jobs.reaper"])
"""
MAX_LINE = 1 << 15  # fits into a pipe

_pipes: set[int] = set()
ATTEMPTS = 8
"""With doubling delays: about four minutes without a network."""


def _close_in_forked_child() -> None:
    for descriptor in _pipes:  # a forked child would keep the pipe open after this process has ended
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _pipes.clear()


os.register_at_fork(after_in_child=_close_in_forked_child)


class Reaper:
    """Ends the job of ``bind`` when this process ends, unless ``release`` was called before."""

    def __init__(self, apply_id: str) -> None:
        """Starts the child. Its log, in the directory of the registry, remains only if it cannot end the job."""
        self._apply_id = apply_id
        reading, self._pipe = os.pipe()
        _pipes.add(self._pipe)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(driver_import_paths())}
        try:
            with registry.log_file(apply_id).open("ab") as log:
                self._child = subprocess.Popen(
                    [sys.executable, "-S", "-c", _WAIT],
                    stdin=reading,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
        except BaseException:
            self._close()
            registry.unregister(apply_id)
            raise
        finally:
            os.close(reading)

    def bind(self, saved_job: bytes) -> None:
        """From now on the child ends this job. ``saved_job`` needs no more than what ``kill`` needs."""
        line = base64.b64encode(saved_job) + b"\n"
        if len(line) > MAX_LINE:
            raise ValueError(f"the job has {len(line)} bytes, more than the {MAX_LINE} that a reaper can take")
        self._write(line)

    def release(self) -> None:
        """The job has ended, or is to outlive this process: ends the child. May be called again."""
        if self._pipe in _pipes:
            self._write(b"\n")
            self._close()
            self._child.wait()
            registry.unregister(self._apply_id)

    def _write(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # someone has killed the child
            os.write(self._pipe, line)

    def _close(self) -> None:
        if self._pipe in _pipes:  # not in a forked child
            _pipes.discard(self._pipe)
            os.close(self._pipe)


def end_job(saved_job: bytes) -> None:
    """Raises MeshgateError if the job still cannot be ended after several attempts."""
    job = job_loads(saved_job)
    apply_id = job.apply_id
    for attempt in range(ATTEMPTS):
        try:
            job.kill()
            break
        except MeshgateError as error:
            if attempt == ATTEMPTS - 1:
                raise
            print(f"attempt {attempt + 1} of {ATTEMPTS}: {error}", file=sys.stderr, flush=True)  # noqa: T201 - the log
            time.sleep(2**attempt)
    if apply_id is not None:
        registry.unregister(apply_id)


if __name__ == "__main__":
    end_job(base64.b64decode(sys.stdin.buffer.read()))
