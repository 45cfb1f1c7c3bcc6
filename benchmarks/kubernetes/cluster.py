"""What the measurements on a cluster share: kubectl, and the CPU time of the API server."""

from __future__ import annotations

import re
import subprocess


def kubectl(*arguments: str, namespace: str = "default", stdin: str | None = None) -> str:
    """The output of kubectl. Raises CalledProcessError, whose output is on stderr."""
    command = ["kubectl", "--namespace", namespace, *arguments]
    return subprocess.run(command, input=stdin, check=True, stdout=subprocess.PIPE, text=True).stdout


def server_cpu() -> float:
    """The CPU time of the API server so far, in seconds, by its own metrics."""
    found = re.search(r"^process_cpu_seconds_total (\S+)$", kubectl("get", "--raw", "/metrics"), re.MULTILINE)
    assert found is not None
    return float(found[1])
