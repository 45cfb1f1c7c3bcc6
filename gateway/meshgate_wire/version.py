"""What this side says of itself in a handshake."""

from __future__ import annotations

import platform

__all__ = ["PROTOCOL_VERSION", "PYTHON_VERSION", "SOFTWARE_VERSION"]

PROTOCOL_VERSION = 1
SOFTWARE_VERSION = "0.1.0"
PYTHON_VERSION = platform.python_version()
