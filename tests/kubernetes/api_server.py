"""Restarts the API server of the cluster under test, like an upgrade of the control plane.

``MESHGATE_TEST_RESTART_API_SERVER`` is the command that restarts it. Without it, the server process is found on this
machine, killed, and started again with the same command.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from tests.kubernetes.cluster import Kubectl

VARIABLE = "MESHGATE_TEST_RESTART_API_SERVER"


def restart_api_server(kubectl: Kubectl) -> None:
    """Returns when the server is ready again."""
    if command := os.environ.get(VARIABLE):
        subprocess.run(command, shell=True, check=True, timeout=60)
    else:
        _restart(_find())
    kubectl.wait_ready()
    _wait_collecting(kubectl)


def _wait_collecting(kubectl: Kubectl) -> None:
    """Waits until the garbage collector, which takes a while to notice a new server, works again."""
    kubectl("create", "configmap", "owner")
    uid = kubectl("get", "configmap", "owner", "-o", "jsonpath={.metadata.uid}")
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": uid}
    owned = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owned", "ownerReferences": [owner]}}
    kubectl("create", "-f", "-", stdin=json.dumps(owned))
    kubectl("delete", "configmap", "owner")
    kubectl.wait_deleted("configmap/owned")


def _find() -> int:
    for entry in os.listdir("/proc"):
        with suppress(OSError):
            if entry.isdigit() and Path(f"/proc/{entry}/comm").read_text(errors="replace").strip() == "kube-apiserver":
                return int(entry)
    raise AssertionError(f"no kube-apiserver runs on this machine: set {VARIABLE} to a command that restarts it")


def _restart(pid: int) -> None:
    process = Path(f"/proc/{pid}")
    command = process.joinpath("cmdline").read_bytes().decode().split("\0")[:-1]
    variables = process.joinpath("environ").read_bytes().decode().split("\0")[:-1]
    executable, directory = os.readlink(process / "exe"), os.readlink(process / "cwd")
    record = _record_of(pid, command)
    with open(os.readlink(process / "fd" / "1"), "ab") as log:
        _end(pid)
        server = subprocess.Popen(
            command,
            executable=executable,
            cwd=directory if os.path.isdir(directory) else "/",  # it may have been deleted since
            env=dict(variable.split("=", 1) for variable in variables),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    _servers.append(server)
    if record is not None:
        record.write_text(f"{server.pid}\n")


_servers: list[subprocess.Popen[bytes]] = []  # never waited for: they outlive the tests


def _record_of(pid: int, command: list[str]) -> Path | None:
    """The pid file of the server, if it exists near its certificates."""
    for argument in command:
        if argument.startswith("/") and argument.endswith(".crt"):
            for path in Path(argument).parent.parent.glob("*/kube-apiserver"):
                if path.is_file() and path.stat().st_size < 16 and path.read_text().strip() == str(pid):
                    return path
    return None


def _end(pid: int) -> None:
    """Kills the server: on SIGTERM it would wait for its watches."""
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    waiter = select.poll()
    waiter.register(pidfd, select.POLLIN)
    assert waiter.poll(30_000), "the API server did not exit"
    os.close(pidfd)
