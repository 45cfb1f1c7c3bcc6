"""The directory for meshgate's files on a host, for the store, image steps and worker processes.

Hosts that have only torchmonarch receive this module's source, or its functions, with the code that uses them.

Imports nothing but the standard library.
"""

from __future__ import annotations

import os
import stat
import tempfile


def default_home() -> str:
    """``$MESHGATE_HOME``, else below the user's cache directory, else below the temporary one.

    Every user can write to the last, so this creates the directory for this user alone. Raises PermissionError if it
    exists and belongs to another user, or others can write to it.
    """
    home = os.environ.get("MESHGATE_HOME")
    if home:
        return os.path.abspath(home)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    if os.path.isabs(cache) and os.access(os.path.dirname(cache), os.W_OK):
        return os.path.join(cache, "meshgate")
    home = os.path.join(tempfile.gettempdir(), f"meshgate-{os.getuid()}")
    try:
        os.mkdir(home, 0o700)
    except FileExistsError:
        found = os.lstat(home)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError(
                f"{home} belongs to another user, or others can write to it: set MESHGATE_HOME to a private directory"
            ) from None
    return home
