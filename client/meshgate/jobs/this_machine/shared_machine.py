"""Says at the start of a local job that other users of the machine could run code in it.

Monarch opens abstract unix sockets in hosts and engines, in addition to the one in the job's private directory, and no
setting of it changes that. They have no permissions, so each user who shares the network namespace can connect.
"""

from __future__ import annotations

import logging
import os
import pwd
from pathlib import Path

log = logging.getLogger("meshgate.jobs")

FIRST_USER = 1000  # user IDs below are the system's own
NOBODY = 65534
_warned: set[str] = set()


def warn_of_other_users() -> None:
    """Logs a warning if other users have processes here: once for the same users."""
    new = [user for user in other_users() if user not in _warned]
    if new:
        _warned.update(new)
        log.warning(
            "other users of this machine (%s) can run code as you while a local job runs, through sockets of Monarch "
            "that have no permissions. Use a container or a machine of your own: see docs/security.md",
            ", ".join(new),
        )


def other_users() -> list[str]:
    """The names of other people's accounts that have processes in this network namespace, as far as can be seen."""
    try:
        entries = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    except OSError:  # not Linux, which alone has abstract sockets
        return []
    namespace = _namespace(Path("/proc/self"))
    users = set()
    for entry in entries:
        try:
            user = entry.stat().st_uid
            if user >= FIRST_USER and user not in (NOBODY, os.getuid()) and _namespace(entry) in (namespace, None):
                users.add(user)
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
    return sorted(map(_name, users))


def _namespace(process: Path) -> str | None:
    """The network namespace of a process; None if this user may not see it.

    Raises FileNotFoundError or ProcessLookupError if it has ended, even if its parent has not waited for it yet.
    """
    try:
        return os.readlink(process / "ns" / "net")
    except PermissionError:
        return None


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:  # such as in a container
        return f"user {user}"
