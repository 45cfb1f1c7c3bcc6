"""The quickstart on a cluster: this program creates two worker pods and a gateway, and deletes them at its end.

export KUBECONFIG=...                                   # any cluster: kind, k3d or a cloud's
python examples/kubernetes.py [--image IMAGE] [--namespace NAMESPACE]

On GPUs, Compute(gpus=8) requests eight for each pod, and spawn_procs(per_host={"gpus": 8}) starts a process for each.
"""

from __future__ import annotations

import argparse
import sys

sys.path.pop(0)  # this directory: this file would hide the library with its name

import meshgate as kt
from meshgate import Actor, KubernetesJob, current_rank, endpoint


class Trainer(Actor):
    @endpoint
    def train_step(self, batch_size: int) -> str:
        print(f"a step of {batch_size} samples")
        return f"rank {current_rank().rank} is done"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", help="image of the worker pods (default: meshgate's own)")
    parser.add_argument("--namespace", default="default", help="namespace for the job")
    arguments = parser.parse_args()
    image = kt.Image(name="trainer")
    if arguments.image:
        image = image.from_docker(arguments.image)
    compute = kt.Compute(replicas=2, image=image)
    with KubernetesJob(compute=compute, namespace=arguments.namespace) as job:
        hosts = job.state().workers
        procs = hosts.spawn_procs(per_host={"gpus": 1})
        trainers = procs.spawn("trainers", Trainer)
        print(trainers.train_step.call(batch_size=32).get())


if __name__ == "__main__":
    main()
