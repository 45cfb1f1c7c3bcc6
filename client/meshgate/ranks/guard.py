"""Ends what this process has started when this process ends, in whatever way. The standard library only."""

from __future__ import annotations

import subprocess

# Kills the process group $1 when its standard input is closed, which happens when this process ends in any way.
_END_WITH_PARENT = 'read _; kill -9 -"$1" 2>/dev/null'


def start_guard(group: int) -> subprocess.Popen[bytes]:
    """A process that kills the process group ``group`` when this process ends. Kill it before the group's id is free
    for other processes."""
    return subprocess.Popen(
        ["/bin/sh", "-c", _END_WITH_PARENT, "guard", str(group)], stdin=subprocess.PIPE, start_new_session=True
    )
