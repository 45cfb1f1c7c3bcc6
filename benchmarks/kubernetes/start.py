"""``python -m benchmarks.kubernetes.start``: the start and the end of a job, beside a bare StatefulSet.

A job's start is from ``apply()`` to the first result from all pods, and its end is ``kill()``. The StatefulSet is the
job's own, without gateway, session and actors: kubectl creates it, waits until it is ready, deletes it, and waits until
its pods are gone. The two take turns, after a round that does not count. ``apply`` is the part of a job's start until
its pods are ready.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from tempfile import TemporaryDirectory

from benchmarks.kubernetes.cluster import kubectl
from meshgate import Actor, Compute, KubernetesJob, endpoint
from meshgate.jobs.kubernetes.requests import JobRequest, mesh_from_compute
from meshgate_kubernetes.manifests.job_objects import mesh_objects

NAME = "meshgate-benchmark"


class First(Actor):
    @endpoint
    def pod(self) -> str:
        return os.uname().nodename


def job(pods: int, namespace: str) -> dict[str, float]:
    started = time.monotonic()
    with (
        TemporaryDirectory() as code,  # empty
        KubernetesJob(Compute(replicas=pods), name=NAME, namespace=namespace, sync_dirs=[code]) as job,
    ):
        job.apply()
        applied = time.monotonic()
        first = job.state(cached_path=None).workers.spawn_procs().spawn("first", First)
        assert len(first.pod.call().get(timeout=300)) == pods
        result = time.monotonic()
    return {"apply": applied - started, "start": result - started, "end": time.monotonic() - result}


def stateful_set(pods: int, namespace: str) -> dict[str, float]:
    mesh = mesh_from_compute("workers", Compute(replicas=pods))
    spec = JobRequest(namespace=namespace, meshes=(mesh,)).spec(f"{NAME}-bare")
    made = next(each for each in mesh_objects(spec, spec.meshes[0]) if each["kind"] == "StatefulSet")
    name = f"statefulset/{made['metadata']['name']}"
    started = time.monotonic()
    try:
        kubectl("apply", "-f", "-", namespace=namespace, stdin=json.dumps(made))
        kubectl("rollout", "status", name, "--timeout=300s", namespace=namespace)
        ready = time.monotonic()
    finally:
        kubectl("delete", name, "--cascade=foreground", "--timeout=300s", namespace=namespace)
    return {"start": ready - started, "end": time.monotonic() - ready}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--namespace", default="default")
    options = parser.parse_args()
    ways = {"KubernetesJob": job, "StatefulSet": stateful_set}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    loads = []
    for number in range(options.rounds + 1):
        loads.append(os.getloadavg()[0])
        for name, measure in ways.items():
            times = measure(options.pods, options.namespace)
            if number:  # else nodes may lack images
                rounds[name].append(times)
    for name, each in rounds.items():
        for part in each[0]:
            seconds = [round(times[part], 1) for times in each]
            print(json.dumps({"what": name, "part": part, "seconds": statistics.median(seconds), "all": seconds}))
    print(json.dumps({"pods": options.pods, "load": [round(each, 1) for each in loads]}))


if __name__ == "__main__":
    main()
