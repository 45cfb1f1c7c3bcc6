"""The errors of the Slurm package.

::

    SlurmError
    ├── NoSlurm         this machine does not have Slurm's commands
    ├── Refused         Slurm refused the job; carries its words
    └── Unreachable     a command of Slurm's failed or did not answer
"""

from __future__ import annotations


class SlurmError(Exception):
    """Base class of all errors of this package. ``str()`` is a sentence or a few lines for people."""


class NoSlurm(SlurmError):
    pass


class Refused(SlurmError):
    pass


class Unreachable(SlurmError):
    pass
