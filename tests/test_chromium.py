from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chromium import without_netlink

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root may filter system calls")


@pytest.mark.parametrize(("family", "status"), [("AF_NETLINK, socket.SOCK_RAW", 1), ("AF_INET, socket.SOCK_STREAM", 0)])
def test_a_browser_cannot_watch_the_interfaces(family: str, status: int, tmp_path: Path) -> None:
    command = [without_netlink(sys.executable, tmp_path), "-c", f"import socket; socket.socket(socket.{family})"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert status == 0 or "PermissionError" in done.stderr
