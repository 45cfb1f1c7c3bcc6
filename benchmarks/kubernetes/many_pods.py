"""``python -m benchmarks.kubernetes.many_pods``: what it costs to watch the start of a job with many pods.

Each pod wants a whole node, of which another pod already uses a part. So none can start, but each might later, and the
job waits until all of them exist and the scheduler has looked at each. Then it is ended. That is compared with the same
StatefulSet without a job around it, because most of the API server's work is for its own controllers. CPU times are in
seconds; ``driver_cpu`` is that of this process.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks.kubernetes.cluster import kubectl, server_cpu
from meshgate import Compute
from meshgate.jobs.kubernetes.compute import default_worker_image
from meshgate.jobs.kubernetes.display import PlainDisplay
from meshgate.jobs.kubernetes.requests import JobRequest, mesh_from_compute
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.jobs import lifecycle
from meshgate_kubernetes.status.readiness import Progress

NAME = "meshgate-benchmark"


class AllPending(Exception):
    """All pods exist, and the scheduler has found no node for any of them."""


class UntilAllPending(PlainDisplay):
    """Shows progress as a driver without a terminal does, and ends the wait when all pods are pending."""

    def __init__(self, pods: int) -> None:
        super().__init__(NAME, sys.stderr)
        self._pods = pods

    def progress(self, progress: Progress) -> None:
        super().progress(progress)
        groups = [re.match(r"(\d+) pods", each.subject) for each in progress.problems if each.reason == "Unschedulable"]
        if sum(int(group[1]) for group in groups if group) >= self._pods:
            raise AllPending


@contextmanager
def no_free_node(namespace: str) -> Iterator[str]:
    """The CPUs of the largest node, part of which a pod uses meanwhile."""
    nodes = json.loads(kubectl("get", "nodes", "-o", "json"))["items"]
    largest = max((node["status"]["allocatable"] for node in nodes), key=lambda each: int(each["cpu"]))["cpu"]
    container = {
        "name": "holder",
        "image": default_worker_image(),
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "infinity"],
        "resources": {"requests": {"cpu": "100m"}},
    }
    spec = {"containers": [container], "terminationGracePeriodSeconds": 1}
    name = f"{NAME}-holder"
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    kubectl("apply", "-f", "-", namespace=namespace, stdin=json.dumps(pod))
    try:
        kubectl("wait", "--for=condition=Ready", f"pod/{name}", "--timeout=180s", namespace=namespace)
        yield largest
    finally:
        kubectl("delete", "pod", name, namespace=namespace)


def watched(pods: int, namespace: str, cpus: str) -> None:
    """A job of so many pods, until none of them has a node, and its deletion."""
    mesh = mesh_from_compute("workers", Compute(replicas=pods, cpus=cpus))
    spec = JobRequest(name=NAME, namespace=namespace, meshes=(mesh,)).spec(NAME)
    try:
        lifecycle.start(Api.from_kubeconfig(), spec, UntilAllPending(pods), timeout=900, forward=True)
    except AllPending:
        return
    raise AssertionError("the pods must not start")


def unwatched(pods: int, namespace: str, cpus: str) -> None:
    """A StatefulSet of so many pods, until they exist, and its deletion."""
    labels = {"app": NAME}
    container = {"name": "worker", "image": default_worker_image(), "resources": {"requests": {"cpu": cpus}}}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    made = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": NAME},
        "spec": {
            "replicas": pods,
            "serviceName": NAME,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": template,
        },
    }
    kubectl("apply", "-f", "-", namespace=namespace, stdin=json.dumps(made))
    kubectl("wait", f"--for=jsonpath={{.status.replicas}}={pods}", f"statefulset/{NAME}", "--timeout=600s",
            namespace=namespace)  # fmt: skip
    kubectl("delete", "statefulset", NAME, "--cascade=foreground", "--timeout=600s", namespace=namespace)


def measure(name: str, run: Callable[[int, str, str], None], pods: int, namespace: str, cpus: str) -> None:
    server, driver, started = server_cpu(), time.process_time(), time.monotonic()
    run(pods, namespace, cpus)
    facts = {
        "what": name,
        "pods": pods,
        "seconds": round(time.monotonic() - started, 1),
        "server_cpu": round(server_cpu() - server, 2),
        "driver_cpu": round(time.process_time() - driver, 2),
    }
    print(json.dumps(facts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=1000)
    parser.add_argument("--namespace", default="default")
    options = parser.parse_args()
    with no_free_node(options.namespace) as cpus:
        measure("StatefulSet", unwatched, options.pods, options.namespace, cpus)
        measure("KubernetesJob", watched, options.pods, options.namespace, cpus)


if __name__ == "__main__":
    main()
