"""The program that a reaper runs once its driver is gone: ends the saved job that it reads from stdin."""

from __future__ import annotations

import base64
import sys
import time

from meshgate.errors import MeshgateError
from meshgate.jobs import registry
from meshgate.jobs.trait import job_loads

ATTEMPTS = 8
"""With doubling delays: about four minutes without a network."""


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
