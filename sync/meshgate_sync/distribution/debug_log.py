"""Turns on the DEBUG log of the sync, by which a version can be followed through the tree (``relay.version_log``).

Imports nothing but the standard library.
"""

from __future__ import annotations

import logging
import os

VARIABLE = "MESHGATE_LOG_LEVEL"
"""The gateway's own setting of its log level."""

_PACKAGE = __name__.rpartition(".distribution.")[0]  # on hosts the package may be loaded under another name


def enable_debug_log() -> None:
    """If the environment variable MESHGATE_LOG_LEVEL is ``debug``, logs what relays do, to stderr unless the process
    has configured its logging. Idempotent."""
    if os.environ.get(VARIABLE, "").lower() != "debug":
        return
    log = logging.getLogger(_PACKAGE)
    log.setLevel(logging.DEBUG)
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        log.addHandler(handler)
