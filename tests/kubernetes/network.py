"""Other routes to a gateway: a local port, and an isolated network namespace that reaches only a proxy."""

from __future__ import annotations

import json
import os
import secrets
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from meshgate import KubernetesJob
from meshgate.jobs.kubernetes.port_forward import open_forward
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.status.discovery import is_ready
from tests.kubernetes.cluster import Kubectl
from tests.kubernetes.proxies import Proxy, proxy


@contextmanager
def local_port(kubectl: Kubectl, target: str) -> Iterator[int]:
    """A local port that forwards each connection by itself to port 8650 of a ready pod of ``target`` (``service/x``).

    ``kubectl port-forward`` would end, with all its connections, when the pod resets one of them.
    """
    labels = json.loads(kubectl("get", target, "-o", "json"))["spec"]["selector"]
    selector = ",".join(f"{name}={value}" for name, value in labels.items())
    api = Api.from_kubeconfig()

    def connect() -> socket.socket:
        pods, _ = api.list_objects("Pod", kubectl.namespace, selector)
        names = [
            pod["metadata"]["name"] for pod in pods if is_ready(pod) and "deletionTimestamp" not in pod["metadata"]
        ]
        assert names, f"no pod of {target} is ready"
        return open_forward(api.port_forward(names[0], kubectl.namespace, 8650)).result(30)

    with _Forwarder(connect) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


class _Forwarder(socketserver.ThreadingTCPServer):
    """Joins each accepted connection to one that ``connect`` opens. Closing it waits for their ends."""

    request_queue_size = 64

    def __init__(self, connect: Callable[[], socket.socket]) -> None:
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        self._connect = connect

    def finish_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        assert isinstance(request, socket.socket)
        with self._connect() as remote:
            back = threading.Thread(target=_copy, args=(remote, request))
            back.start()
            _copy(request, remote)
            back.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    """Copies until one of the two ends, and then ends both."""
    with suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    for each in (source, sink):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True)
class Place:
    """A place to run a driver. ``address``: the address of this machine, as seen from there."""

    address: str
    prefix: tuple[str, ...]

    def run(self, program: str, environment: dict[str, str], timeout: float = 100) -> str:
        """Runs the program without a kubeconfig and returns its output; fails with its error output."""
        return self.run_python("-c", program, environment=environment, timeout=timeout)

    def run_python(self, *arguments: str, environment: dict[str, str], timeout: float) -> str:
        """As ``run``, with these arguments of the interpreter."""
        variables = {name: value for name, value in os.environ.items() if name != "KUBECONFIG"} | environment
        command = [*self.prefix, sys.executable, *arguments]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=timeout, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextmanager
def isolated_place() -> Iterator[Place]:
    """A network namespace with one link to this machine and no other route.

    Without root, which namespaces need, it is this machine itself.
    """
    if os.geteuid() != 0:
        yield Place("127.0.0.1", ())
        return
    name = f"mg{secrets.token_hex(3)}"
    # Not `ip netns add`, which mounts over /run/netns, where the cluster keeps the namespaces of its pods.
    holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        _wait_unshared(holder.pid)
        network = ip_address("198.18.0.0") + 4 * (holder.pid % 2**15)  # no other process has this pid
        _ip("link", "add", name, "type", "veth", "peer", "name", "laptop", "netns", str(holder.pid))
        _ip("address", "add", f"{network + 1}/30", "dev", name)
        _ip("link", "set", name, "up")
        inside = ("nsenter", f"--net=/proc/{holder.pid}/ns/net")
        _run(*inside, "ip", "address", "add", f"{network + 2}/30", "dev", "laptop")
        for device in ("laptop", "lo"):
            _run(*inside, "ip", "link", "set", device, "up")
        yield Place(str(network + 1), inside)
    finally:
        holder.communicate()  # the namespace and the link end with it


def _wait_unshared(pid: int) -> None:
    while os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        continue


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


@contextmanager
def ingress(job: KubernetesJob, kubectl: Kubectl, directory: Path) -> Iterator[tuple[Place, Proxy, dict[str, str]]]:
    """Where a driver runs, nginx before the gateway of ``job``, and the driver's environment."""
    with ExitStack() as stack:
        place = stack.enter_context(isolated_place())
        port = stack.enter_context(local_port(kubectl, f"service/{job.name}-gateway"))
        nginx = stack.enter_context(proxy("nginx", directory, place.address, port))
        encoded = kubectl("get", "secret", f"{job.name}-token", "-o", "go-template={{.data.token | base64decode}}")
        yield place, nginx, {"MESHGATE_URL": nginx.url, "MESHGATE_CA": str(nginx.ca), "MESHGATE_TOKEN": encoded}
