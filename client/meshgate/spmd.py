"""Training scripts on every rank of a job, as torchrun runs them: the names of ``monarch.job.spmd``."""

from __future__ import annotations

from meshgate.jobs.spmd.job import SPMDJob, serve

__all__ = ["SPMDJob", "serve"]
