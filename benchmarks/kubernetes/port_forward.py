"""``python -m benchmarks.kubernetes.port_forward``: uploads through meshgate's port-forward and kubectl's, in turn.

Both go to the same pod, which only counts bytes, so what differs is the way through the API server. ``driver_cpu`` is
the CPU time of this process, in seconds, for all bytes; that of kubectl is in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from benchmarks.kubernetes.cluster import kubectl
from meshgate.jobs.kubernetes.compute import default_worker_image
from meshgate.jobs.kubernetes.port_forward import open_forward
from meshgate_kubernetes.api.client import Api

POD, PORT = "meshgate-benchmark-sink", 9000
BLOCK = os.urandom(1 << 20)
SINK = """
import socket, threading
def serve(connection):
    with connection:
        left, buffer = int.from_bytes(connection.recv(8), "big"), bytearray(1 << 20)
        while left > 0 and (size := connection.recv_into(buffer)):
            left -= size
        connection.sendall(b"x")
server = socket.create_server(("0.0.0.0", 9000))
while True:
    threading.Thread(target=serve, args=server.accept()[:1], daemon=True).start()
"""


@contextmanager
def sink(namespace: str) -> Iterator[None]:
    """A pod that counts bytes."""
    container = {
        "name": "sink",
        "image": default_worker_image(),
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", SINK],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
    }
    spec = {"containers": [container], "terminationGracePeriodSeconds": 1}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": POD}, "spec": spec}
    kubectl("apply", "-f", "-", namespace=namespace, stdin=json.dumps(pod))
    try:
        kubectl("wait", "--for=condition=Ready", f"pod/{POD}", "--timeout=180s", namespace=namespace)
        yield
    finally:
        kubectl("delete", "pod", POD, "--grace-period=1", namespace=namespace)


def upload(connection: socket.socket, size: int) -> float:
    """Megabytes per second, until the pod has received the last byte."""
    started = time.monotonic()
    connection.sendall(size.to_bytes(8, "big"))
    for left in range(size, 0, -len(BLOCK)):
        connection.sendall(memoryview(BLOCK)[:left])
    assert connection.recv(1) == b"x"
    return size / 1e6 / (time.monotonic() - started)


def through_meshgate(api: Api, namespace: str, size: int) -> float:
    with open_forward(api.port_forward(POD, namespace, PORT)).result(30) as connection:
        return upload(connection, size)


def through_kubectl(namespace: str, size: int) -> float:
    command = ["kubectl", "--namespace", namespace, "port-forward", f"pod/{POD}", f":{PORT}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as forward:
        try:
            assert forward.stdout is not None
            line = forward.stdout.readline()  # Forwarding from 127.0.0.1:43211 -> 9000
            port = int(line.split()[2].rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port)) as connection:
                return upload(connection, size)
        finally:
            forward.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--namespace", default="default")
    options = parser.parse_args()
    size = options.megabytes * 1_000_000
    api = Api.from_kubeconfig()
    ways: dict[str, Callable[[], float]] = {
        "meshgate": partial(through_meshgate, api, options.namespace, size),
        "kubectl": partial(through_kubectl, options.namespace, size),
    }
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    cpu = dict.fromkeys(ways, 0.0)
    with sink(options.namespace):
        for _ in range(options.rounds):
            for name, measure in ways.items():
                before = time.process_time()
                speeds[name].append(round(measure(), 1))
                cpu[name] += time.process_time() - before
    for name, each in speeds.items():
        facts = {"way": name, "MB/s": statistics.median(each), "all": each, "driver_cpu": round(cpu[name], 2)}
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
