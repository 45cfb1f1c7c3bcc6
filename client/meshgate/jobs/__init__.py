"""Jobs: a specification of hosts, and the machines that run it once it is applied.

``trait`` has the rules of every job, ``saved`` and ``cached`` the job file; ``local``, ``process`` and ``kubernetes``
are the job types. This package starts, finds and ends gateways; it never sends work to hosts itself.
"""

from __future__ import annotations

from meshgate.jobs.local import LocalJob
from meshgate.jobs.process import ProcessJob
from meshgate.jobs.state import JobState
from meshgate.jobs.trait import JobTrait, job_load, job_loads

__all__ = ["JobState", "JobTrait", "LocalJob", "ProcessJob", "job_load", "job_loads"]
