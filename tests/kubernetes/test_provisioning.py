"""A pod without rights has jobs made by a gateway that has them, within the policy of that gateway's operator."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshgate import Compute, KubernetesJob
from meshgate.errors import JobNotRunning, JobStartFailed
from tests.kubernetes.actors import Trainer
from tests.kubernetes.cluster import Kubectl
from tests.kubernetes.network import local_port, nginx

EXAMPLE = Path(__file__).parents[2] / "examples" / "provisioning-gateway.yaml"
TOKEN = secrets.token_hex(24)

DRIVER = """
import os
from meshgate import Actor, Compute, KubernetesJob, endpoint

class Where(Actor):
    @endpoint
    def pod(self):
        return os.uname().nodename

with KubernetesJob(compute=Compute(memory="500Mi", replicas=2), name="inner", namespace=os.environ["SPACE"]) as job:
    print(*job.state().workers.spawn_procs().spawn("where", Where).pod.call().get(timeout=60).values())
"""


@pytest.fixture(scope="module")
def provider(namespace: str, kubectl: Kubectl, images: tuple[str, str]) -> Iterator[str]:
    """The example of the documents, in this namespace and with these images; its address in the cluster."""
    text = (
        EXAMPLE.read_text().replace("training", namespace).replace("ghcr.io/meshgate/meshgate-gateway:0.1.0", images[0])
    )
    text = text.replace("ghcr.io/meshgate/", images[1].partition(":")[0])
    kubectl("create", "secret", "generic", "meshgate", f"--from-literal=token={TOKEN}")
    kubectl("apply", "-f", "-", stdin=text)
    kubectl("rollout", "status", "deployment/meshgate", "--timeout=180s", timeout=190)
    yield kubectl("get", "service", "meshgate", "-o", "jsonpath=ws://{.spec.clusterIP}:8650")
    kubectl("delete", "-f", "-", stdin=text, timeout=60)
    kubectl("delete", "secret", "meshgate")


def test_a_pod_without_rights_runs_a_job(
    namespace: str, kubectl: Kubectl, images: tuple[str, str], provider: str
) -> None:
    variables = {"MESHGATE_URL": provider, "SPACE": namespace, "MESHGATE_WORKER_IMAGE": images[1]}
    options = [f"--env={name}={value}" for name, value in variables.items()]
    kubectl("run", "driver", f"--image={images[1]}", "--image-pull-policy=IfNotPresent", "--restart=Never", *options,
            "--command", "--", "python", "-c", DRIVER)  # fmt: skip
    try:
        kubectl.wait_ended("driver")
        assert "inner-workers-0 inner-workers-1" in kubectl("logs", "driver")
        assert kubectl("get", "pod", "driver", "-o", "jsonpath={.status.phase}") == "Succeeded", kubectl(
            "logs", "driver"
        )
    finally:
        kubectl("delete", "pod", "driver", "--grace-period=1")


def test_a_laptop_with_only_a_url_and_a_token_runs_a_job(
    namespace: str, kubectl: Kubectl, provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHGATE_TOKEN", TOKEN)
    compute = Compute(memory="500Mi")
    with local_port(kubectl, "service/meshgate") as port:
        url = f"http://127.0.0.1:{port}"
        with KubernetesJob(compute=compute, name="byurl", namespace=namespace, gateway_url=url) as job:
            trainers = job.state().workers.spawn_procs().spawn("trainers", Trainer)
            assert trainers.pod.call_one().get(timeout=60) == "byurl-workers-0"
            again = KubernetesJob(name="byurl", namespace=namespace, gateway_url=url)
            assert again.state(cached_path=None).workers.sizes == {"hosts": 1}
            again.kill()
        with pytest.raises(JobNotRunning, match="byurl"):
            KubernetesJob(name="byurl", namespace=namespace, gateway_url=url).apply()


def test_a_job_comes_up_through_an_ingress_that_cuts_every_connection_after_seconds(
    namespace: str, kubectl: Kubectl, provider: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MESHGATE_TOKEN", TOKEN)
    with local_port(kubectl, "service/meshgate") as port, nginx(tmp_path, "127.0.0.1", port) as proxy:
        monkeypatch.setenv("MESHGATE_CA", str(proxy.ca))
        job = KubernetesJob(compute=Compute(memory="500Mi"), name="cut", namespace=namespace, gateway_url=proxy.url)
        with proxy.cutting_every(1.5), job:
            trainers = job.state().workers.spawn_procs().spawn("trainers", Trainer)
            assert trainers.pod.call_one().get(timeout=60) == "cut-workers-0"


def test_what_the_policy_does_not_allow_is_refused_by_name(
    namespace: str, kubectl: Kubectl, provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHGATE_TOKEN", TOKEN)
    with local_port(kubectl, "service/meshgate") as port:
        compute = Compute(memory="65Gi", image="docker.io/evil:1", replicas=17, service_account_name="admin")
        job = KubernetesJob(compute=compute, name="greedy", namespace=namespace, gateway_url=f"http://127.0.0.1:{port}")
        with pytest.raises(JobStartFailed) as caught:
            job.apply()
    for told in ("17 pods are more than 16", "65Gi of memory is more than 64Gi", "'docker.io/evil:1'", "'admin'"):
        assert told in str(caught.value)


def test_a_stranger_from_elsewhere_is_told_the_missing_right(
    namespace: str, kubectl: Kubectl, provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = Kubectl("default")
    elsewhere("create", "serviceaccount", f"stranger-{namespace}")
    try:
        monkeypatch.setenv("MESHGATE_TOKEN", elsewhere.token_of(f"stranger-{namespace}"))
        with local_port(kubectl, "service/meshgate") as port:
            url = f"http://127.0.0.1:{port}"
            with pytest.raises(JobStartFailed, match=r"may not create statefulsets\.apps in namespace"):
                KubernetesJob(compute=Compute(memory="1Gi"), namespace=namespace, gateway_url=url).apply()
    finally:
        elsewhere("delete", "serviceaccount", f"stranger-{namespace}")
