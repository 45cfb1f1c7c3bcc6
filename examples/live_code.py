"""Live code: edit, save, and the next call runs it. On this machine, or on a cluster.

    python examples/live_code.py
    python examples/live_code.py --kubernetes IMAGE     # worker pods with this image, on the cluster of KUBECONFIG

It creates a small project in a temporary directory, edits it while the job runs, and shows what the workers run. On
GPUs, only ``Compute(gpus=2)`` is new: what live actors have there, such as a model, stays there when code is reloaded.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.pop(0)  # this directory: its kubernetes.py would hide the library with that name

import meshgate as kt

MODEL = """
from meshgate import Actor, endpoint

from rates import LEARNING_RATE


class Model(Actor):
    @endpoint
    def rate(self) -> float:
        return LEARNING_RATE
"""


def save_rate(project: Path, rate: float) -> None:
    (project / "rates.py").write_text(f"LEARNING_RATE = {rate}\n")
    print(f"\nsaved rates.py: LEARNING_RATE = {rate}")


def rates(mesh: Any) -> list[float]:
    return list(mesh.rate.call().get().values())


def make_job(arguments: argparse.Namespace) -> Any:
    if arguments.kubernetes:
        compute = kt.Compute(replicas=2, image=kt.Image("live").from_docker(arguments.kubernetes))
        return kt.KubernetesJob(compute=compute, namespace=arguments.namespace)
    return kt.ProcessJob({"workers": 2})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kubernetes", metavar="IMAGE", help="run on the cluster that KUBECONFIG selects")
    parser.add_argument("--namespace", default="default", help="namespace for the job")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="live-code-") as directory:
        project = Path(directory)
        (project / "model.py").write_text(MODEL)
        save_rate(project, 0.1)
        os.chdir(project)
        sys.path.insert(0, str(project))
        with make_job(arguments) as job:
            show(job, project)
        os.chdir("/")


def show(job: Any, project: Path) -> None:
    hosts = job.state().workers
    job.sync(watch=True)  # prints a report; from now on every save is pushed
    model = importlib.import_module("model").Model
    procs = hosts.spawn_procs(per_host={"gpus": 2})
    first = procs.spawn("first", model)
    print(f"four processes run it:                   {rates(first)}")

    save_rate(project, 0.02)
    started = time.perf_counter()
    job.sync(quiet=True)  # as the watcher would within 0.1 s; called here to measure it
    print(f"new processes run the new line:          {rates(hosts.spawn_procs().spawn('second', model))}")
    print(f"from save to their first call:           {time.perf_counter() - started:.2f} s")
    print(f"old processes still run their version:   {rates(first)}")

    save_rate(project, 0.003)
    started = time.perf_counter()
    job.sync(quiet=True)
    report = procs.reload().get().item(hosts=0, gpus=0)
    print(f"after reload(), they have reloaded:      {', '.join(report['modules'])}")
    print(f"live objects with old code:              {', '.join(report['old_classes'])}")
    print(f"a new actor in the same processes:       {rates(procs.spawn('third', model))}")
    print(f"from save to its first call:             {time.perf_counter() - started:.2f} s")


if __name__ == "__main__":
    main()
