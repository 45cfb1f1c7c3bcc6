"""A job in the cluster and one on this machine, in one program."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from meshgate import Channel, Compute, KubernetesJob, ProcessJob, use_client
from meshgate.errors import InvalidRequestError
from tests.kubernetes.actors import Trainer


def test_a_job_in_the_cluster_and_one_on_this_machine_work_together(namespace: str) -> None:
    with (
        KubernetesJob(compute=Compute(replicas=2), name="two-jobs", namespace=namespace) as cluster,
        ProcessJob({"here": 1}) as local,
    ):
        pods = cluster.state().workers.spawn_procs().spawn("trainers", Trainer)
        here: Any = local.state().here.spawn_procs().spawn("trainers", Trainer)

        async def both() -> tuple[Any, str]:
            return await asyncio.gather(pods.train_step.call(1), here.train_step.call_one(2))

        steps, step = asyncio.run(both())
        assert sorted(steps.values()) == [f"step of 1 on {pod}" for pod in sorted(pods.pod.call().get().values())]
        assert step.startswith("step of 2 on ")
        assert step.removeprefix("step of 2 on ") not in {each.removeprefix("step of 1 on ") for each in steps.values()}
        kept = pods.pod.keep()
        with use_client(cluster.client):
            port, _ = Channel[str].open()
        for given in (pods, kept, port):
            with pytest.raises(InvalidRequestError, match="belongs to another session"):
                here.train_step.call(given)
        assert here.train_step.call_one(kept.slice(hosts=0).get().item()).get().startswith("step of ")
