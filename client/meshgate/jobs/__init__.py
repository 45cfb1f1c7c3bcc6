"""Jobs: where a program runs, and how its hosts come to be."""

from __future__ import annotations

from meshgate.jobs.local import LocalJob
from meshgate.jobs.process import ProcessJob
from meshgate.jobs.state import JobState
from meshgate.jobs.trait import JobTrait, job_load, job_loads

__all__ = ["JobState", "JobTrait", "LocalJob", "ProcessJob", "job_load", "job_loads"]
