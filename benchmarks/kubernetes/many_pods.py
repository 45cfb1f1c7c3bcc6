"""``python -m benchmarks.kubernetes.many_pods``: what it costs to watch the start of a job with many pods.

No node has the label that the pods ask for, so they stay pending, and the job fails with that reason and is deleted.
That is compared with the same StatefulSet without a job around it, because most of the API server's work is for its own
controllers. CPU times are in seconds; ``driver_cpu`` is that of this process.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

from benchmarks.kubernetes.cluster import kubectl, server_cpu
from meshgate import Compute, KubernetesJob
from meshgate.errors import JobStartFailed
from meshgate.jobs.kubernetes.compute import default_worker_image

NAME = "meshgate-benchmark"
NOWHERE = {"meshgate.dev/benchmark": "nowhere"}


def watched(pods: int, namespace: str) -> None:
    """A job of so many pods, until it has failed and is deleted."""
    job = KubernetesJob(compute=Compute(replicas=pods, node_selector=NOWHERE), name=NAME, namespace=namespace)
    try:
        job.apply()
    except JobStartFailed as error:
        if "Unschedulable" not in str(error):
            raise
        return
    job.kill()
    raise AssertionError("the pods must not start")


def unwatched(pods: int, namespace: str) -> None:
    """A StatefulSet of so many pods, until they exist, and its deletion."""
    labels = {"app": NAME}
    container = {"name": "worker", "image": default_worker_image()}
    template = {"metadata": {"labels": labels}, "spec": {"nodeSelector": NOWHERE, "containers": [container]}}
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


def measure(name: str, run: Callable[[int, str], None], pods: int, namespace: str) -> None:
    server, driver, started = server_cpu(), time.process_time(), time.monotonic()
    run(pods, namespace)
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
    measure("StatefulSet", unwatched, options.pods, options.namespace)
    measure("KubernetesJob", watched, options.pods, options.namespace)


if __name__ == "__main__":
    main()
