"""Jobs in Slurm, for the client and the gateway.

``spec`` is what a job asks for, ``script`` the batch script that it becomes, ``status`` what Slurm reports about it,
``commands`` the only part of the distribution that runs Slurm's commands, and ``login`` the program that the client
runs on the login node to start, inspect and end jobs.
"""

from __future__ import annotations

from meshgate_slurm.spec import SlurmSpec

__all__ = ["SlurmSpec"]
