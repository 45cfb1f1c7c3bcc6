"""A driver that reaches only nginx: over TLS, despite cuts, with workers from each of the three ways."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshgate import Compute, ImageSpec, KubernetesJob
from tests.kubernetes.cluster import Kubectl, bare_worker_pods
from tests.kubernetes.monarch_operator import monarch_operator
from tests.kubernetes.network import ingress

DRIVER = """
import os, socket, time
from meshgate import Actor, KubernetesJob, endpoint

class Counter(Actor):
    def __init__(self):
        self.calls = []

    @endpoint
    def add(self, number):
        self.calls.append(number)
        return os.uname().nodename

    @endpoint
    def all(self):
        return self.calls

    @endpoint
    def rest(self, seconds):
        time.sleep(seconds)
        return "rested"

job = KubernetesJob()
counters = job.state(cached_path=None).workers.spawn_procs(per_host={"gpus": 1}).spawn("counters", Counter)
print(*counters.add.call(0).get(timeout=60).values())
"""

CUTS = """
until = time.monotonic() + 8
sent = [0]
while time.monotonic() < until or len(sent) <= 20:
    sent.append(len(sent))
    counters.add.call(sent[-1]).get(timeout=60)
assert all(calls == sent for calls in counters.all.call().get(timeout=60).values())
assert set(counters.rest.call(4).get(timeout=60).values()) == {"rested"}
print("calls:", len(sent))
"""

NOTHING_ELSE = """
try:
    socket.create_connection(("{host}", {port}), timeout=2).close()
    print("reached")
except OSError:
    print("isolated")
"""


def test_pods_created_for_the_job_through_tls(namespace: str, kubectl: Kubectl, tmp_path: Path) -> None:
    with KubernetesJob(compute=Compute(replicas=2), name="outside", namespace=namespace) as job:
        job.apply()
        with ingress(job, kubectl, tmp_path) as (place, _, environment):
            server = kubectl("config", "view", "--minify", "-o", "jsonpath={.clusters[0].cluster.server}")
            host, port = server.rpartition("/")[2].split(":")
            output = place.run(DRIVER + NOTHING_ELSE.format(host=host, port=port), environment)
    assert output == f"outside-workers-0 outside-workers-1\n{'isolated' if place.prefix else 'reached'}\n"


def test_frequent_cuts_lose_nothing(namespace: str, kubectl: Kubectl, tmp_path: Path) -> None:
    # Some load balancers cut connections after 30 s; cutting twenty times as often makes the test harder and shorter.
    with KubernetesJob(compute=Compute(replicas=2), name="cuts", namespace=namespace) as job:
        job.apply()
        with ingress(job, kubectl, tmp_path) as (place, proxy, environment), proxy.cutting_every(1.5):
            output = place.run(DRIVER + CUTS, environment)
    assert int(output.rpartition("calls: ")[2]) > 20


def test_existing_pods_through_tls(namespace: str, kubectl: Kubectl, images: tuple[str, str], tmp_path: Path) -> None:
    with bare_worker_pods(kubectl, images[1], "barer", 2):
        kubectl("rollout", "status", "statefulset/barer", "--timeout=180s", timeout=190)
        with KubernetesJob(selector={"app": "barer"}, namespace=namespace) as job:
            job.apply()
            with ingress(job, kubectl, tmp_path) as (place, _, environment):
                assert place.run(DRIVER, environment) == "barer-0 barer-1\n"


@pytest.mark.disturbing
def test_a_mesh_of_the_monarch_operator_through_tls(
    namespace: str, kubectl: Kubectl, images: tuple[str, str], tmp_path: Path
) -> None:
    with monarch_operator(kubectl):
        job = KubernetesJob(name="crdtls", namespace=namespace)
        job.add_mesh("workers", 2, image_spec=ImageSpec(images[1]))
        with job:
            job.apply()
            with ingress(job, kubectl, tmp_path) as (place, _, environment):
                assert len(place.run(DRIVER, environment).split()) == 2


def test_a_wrong_token_and_an_untrusted_certificate_are_reported(
    namespace: str, kubectl: Kubectl, tmp_path: Path
) -> None:
    program = "from meshgate import KubernetesJob; KubernetesJob().state(cached_path=None)"
    with KubernetesJob(compute=Compute(), name="strict", namespace=namespace) as job:
        job.apply()
        with ingress(job, kubectl, tmp_path) as (place, _, environment):
            with pytest.raises(AssertionError, match="set MESHGATE_TOKEN"):
                place.run(program, environment | {"MESHGATE_TOKEN": "x" * 32})
            with pytest.raises(AssertionError, match=r"signed by 'O=tests, CN=test CA'.* set MESHGATE_CA"):
                place.run(program, {name: value for name, value in environment.items() if name != "MESHGATE_CA"})
