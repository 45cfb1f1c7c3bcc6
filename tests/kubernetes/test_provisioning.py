"""A provisioning gateway creates jobs for a pod without permissions, within the operator's policy."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshgate import Compute, KubernetesJob
from meshgate.errors import JobNotRunning, JobStartFailed
from meshgate_gateway.provisioning.policy import read_policy
from tests.kubernetes.actors import Trainer
from tests.kubernetes.cluster import Kubectl
from tests.kubernetes.network import local_port
from tests.kubernetes.proxies import proxy

DEPLOYMENT = Path(__file__).parents[2] / "deploy" / "provisioning-gateway"
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


def overlay(directory: Path, namespace: str, images: tuple[str, str], *components: str) -> str:
    """A copy of the example, adapted to this namespace and these images."""
    place = directory / "deploy"
    shutil.copytree(DEPLOYMENT, place)
    image, _, tag = images[0].rpartition(":")
    changes = {
        "training": namespace,
        "newTag: 0.1.0": f"newName: {image}, newTag: {tag}",
        "components: []": f"components: [{', '.join(f'../components/{name}' for name in components)}]",
        "ghcr.io/meshgate/meshgate-gateway:0.1.0": images[0],
        '"ghcr.io/meshgate/"': f'"{images[1].partition(":")[0]}"',
    }
    for file in (place / "example").iterdir():
        text = file.read_text()
        for old, new in changes.items():
            text = text.replace(old, new)
        file.write_text(text)
    return str(place / "example")


@contextmanager
def deployed(kubectl: Kubectl, images: tuple[str, str], directory: Path, **policy: Any) -> Iterator[None]:
    """A gateway that is deployed as documented, with ``policy`` besides the example's."""
    place = Path(overlay(directory, kubectl.namespace, images, "ingress"))
    example = json.loads((place / "policy.json").read_text())
    (place / "policy.json").write_text(json.dumps({**example, **policy}))
    kubectl("create", "secret", "generic", "meshgate", f"--from-literal=token={TOKEN}")
    try:
        kubectl("apply", "-k", str(place))
        kubectl("rollout", "status", "deployment/meshgate", "--timeout=180s", timeout=190)
        yield
    finally:
        kubectl("delete", "-k", str(place), "--ignore-not-found", timeout=60)
        kubectl("delete", "secret", "meshgate")


@pytest.fixture(scope="module")
def provider(kubectl: Kubectl, images: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the gateway in the cluster."""
    with deployed(kubectl, images, tmp_path_factory.mktemp("overlay")):
        yield kubectl("get", "service", "meshgate", "-o", "jsonpath=ws://{.spec.clusterIP}:8650")


def rendered(kubectl: Kubectl, directory: str) -> dict[tuple[str, str], Any]:
    """The objects of an overlay, by kind and name."""
    objects = yaml.safe_load_all(kubectl("kustomize", directory))
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


def test_the_components_lead_to_the_gateways_ports(kubectl: Kubectl, images: tuple[str, str], tmp_path: Path) -> None:
    found = rendered(kubectl, overlay(tmp_path, "team", images, "ingress", "httproute", "service-monitor"))
    service, metrics = (found["Service", name]["spec"] for name in ("meshgate", "meshgate-metrics"))
    (port,) = service["ports"]
    (container,) = found["Deployment", "meshgate"]["spec"]["template"]["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert (ports[port["targetPort"]], port["appProtocol"]) == (port["port"], "kubernetes.io/ws")
    (rule,) = found["HTTPRoute", "meshgate"]["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "meshgate", "port": port["port"]}]
    (path,) = found["Ingress", "meshgate"]["spec"]["rules"][0]["http"]["paths"]
    assert path["backend"]["service"] == {"name": "meshgate", "port": {"name": port["name"]}}
    monitor = found["ServiceMonitor", "meshgate"]["spec"]
    assert (
        monitor["selector"]["matchLabels"].items() <= found["Service", "meshgate-metrics"]["metadata"]["labels"].items()
    )
    assert [each["port"] for each in monitor["endpoints"]] == [each["name"] for each in metrics["ports"]]
    assert {"name": "MESHGATE_METRICS_PORT", "value": str(ports["metrics"])} in container["env"]
    assert container["image"] == images[0]
    assert {each["metadata"].get("namespace", "team") for each in found.values()} == {"team"}


def test_the_cluster_accepts_the_documented_deployment(
    kubectl: Kubectl, images: tuple[str, str], tmp_path: Path
) -> None:
    # Gateway API and Prometheus operator, which the other components need, are not in every cluster.
    directory = overlay(tmp_path, kubectl.namespace, images, "ingress")
    accepted = kubectl("apply", "-k", directory, "--dry-run=server").splitlines()
    kinds = sorted(kind for kind, _ in rendered(kubectl, directory))
    assert sorted(line.partition("/")[0].partition(".")[0] for line in accepted) == [kind.lower() for kind in kinds]
    assert all(line.endswith("(server dry run)") for line in accepted)


@pytest.mark.parametrize("folder", ["base", "example"])
def test_the_policies_of_the_deployment_are_valid(folder: str) -> None:
    policy = read_policy(DEPLOYMENT / folder / "policy.json")
    assert bool(policy.namespaces) == (folder == "example")  # the base allows nothing


def test_a_pod_without_permissions_runs_a_job(
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


def test_a_job_starts_through_an_ingress_that_keeps_cutting_connections(
    namespace: str, kubectl: Kubectl, provider: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MESHGATE_TOKEN", TOKEN)
    with local_port(kubectl, "service/meshgate") as port, proxy("nginx", tmp_path, "127.0.0.1", port) as nginx:
        monkeypatch.setenv("MESHGATE_CA", str(nginx.ca))
        job = KubernetesJob(compute=Compute(memory="500Mi"), name="cut", namespace=namespace, gateway_url=nginx.url)
        with nginx.cutting_every(1.5), job:
            trainers = job.state().workers.spawn_procs().spawn("trainers", Trainer)
            assert trainers.pod.call_one().get(timeout=60) == "cut-workers-0"


def test_policy_violations_are_reported(
    namespace: str, kubectl: Kubectl, provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHGATE_TOKEN", TOKEN)
    with local_port(kubectl, "service/meshgate") as port:
        compute = Compute(gpus=9, image="docker.io/evil:1", replicas=17, service_account_name="admin")
        job = KubernetesJob(compute=compute, name="greedy", namespace=namespace, gateway_url=f"http://127.0.0.1:{port}")
        with pytest.raises(JobStartFailed) as caught:
            job.apply()
    violations = (
        "17 pods exceed the limit of 16",
        "9 of nvidia.com/gpu exceeds the limit of 8",
        "'docker.io/evil:1'",
        "'admin'",
    )
    for text in violations:
        assert text in str(caught.value)


def test_a_foreign_identity_gets_the_missing_verb(
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
