"""Ctrl-C while a job is in the queue: one ends the wait, a second one within a few seconds the job."""

from __future__ import annotations

import sys
import threading

SECONDS = 3.0


def second_interrupt(job_id: int, seconds: float = SECONDS) -> bool:
    """Says what becomes of the job, and returns whether another Ctrl-C follows."""
    try:
        sys.stderr.write(
            f"\nSlurm job {job_id} stays in the queue, and state() waits for it again. Ctrl-C within {seconds:g} s "
            "cancels it\n"
        )
        sys.stderr.flush()
        threading.Event().wait(seconds)
    except KeyboardInterrupt:
        return True
    return False
