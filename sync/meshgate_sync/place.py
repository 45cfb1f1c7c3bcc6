"""Where a host keeps what is meshgate's: said once, for the store, the image steps and the processes they are for.

Hosts that hold nothing but torchmonarch get this module's text or its functions along with what uses them.

Imports nothing but the standard library.
"""

from __future__ import annotations

import os
import stat
import tempfile

__all__ = ["default_home"]


def default_home() -> str:
    """``$MESHGATE_HOME``, else below the user's cache directory, else below the temporary one.

    The last may be written by anyone, so the directory is made here, for this user alone. Raises PermissionError where
    somebody else has made it, or can write to it.
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
                f"{home} is not a directory of this user's alone: set MESHGATE_HOME to one that is"
            ) from None
    return home
