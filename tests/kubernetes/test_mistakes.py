"""Mistakes of a first-time user are reported with what to do, and leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from meshgate import Compute, ImageSpec, KubernetesJob
from meshgate.errors import GatewayLostError, JobError, JobNotRunning, JobStartFailed
from tests.kubernetes.actors import Trainer
from tests.kubernetes.cluster import Kubectl
from tests.kubernetes.network import local_port

REPORTED_WITHIN = 300.0  # seconds, for a busy machine; without giving up early these would take the job's 15 minutes


def failure(job: KubernetesJob) -> str:
    started = time.monotonic()
    with pytest.raises(JobStartFailed) as caught, job:
        job.apply()
    assert time.monotonic() - started < REPORTED_WITHIN
    return str(caught.value)


def test_a_missing_namespace(namespace: str) -> None:
    error = failure(KubernetesJob(compute=Compute(), name="nowhere", namespace=f"{namespace}-not"))
    assert f"namespace '{namespace}-not' does not exist" in error
    assert f"kubectl create namespace {namespace}-not" in error


def test_a_kubeconfig_without_credentials(namespace: str, kubectl: Kubectl, tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(kubectl("config", "view", "--raw", "--minify", "--flatten"))
    anonymous = Kubectl(namespace, path)
    anonymous("config", "unset", f"users.{anonymous('config', 'view', '-o', 'jsonpath={.users[0].name}')}")
    error = failure(KubernetesJob(compute=Compute(), name="anonymous", namespace=namespace, kubeconfig=path))
    assert f"the kubeconfig {path} provides no credentials for the API server at" in error


def test_a_credential_plugin_that_fails_is_reported_with_its_reason(
    namespace: str, kubectl: Kubectl, tmp_path: Path
) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(kubectl("config", "view", "--raw", "--minify", "--flatten"))
    expired = Kubectl(namespace, path)
    user = expired("config", "view", "-o", "jsonpath={.users[0].name}")
    expired("config", "unset", f"users.{user}")
    plugin = ("--exec-api-version=client.authentication.k8s.io/v1beta1", "--exec-command=sh", "--exec-arg=-c")
    expired("config", "set-credentials", user, *plugin, "--exec-arg=echo the login has expired >&2; exit 1")
    job = KubernetesJob(compute=Compute(), name="expired", namespace=namespace, kubeconfig=path)
    with pytest.raises(JobError, match=r"the credential plugin of the kubeconfig .* failed: .*the login has expired"):
        job.apply()


def test_the_gateway_of_a_job_is_used_with_an_exported_kubeconfig_and_creates_no_other_job(
    namespace: str, kubectl: Kubectl, monkeypatch: pytest.MonkeyPatch
) -> None:
    with KubernetesJob(compute=Compute(), name="single", namespace=namespace) as job:
        job.apply()
        with local_port(kubectl, "service/single-gateway") as port:
            url = f"http://127.0.0.1:{port}"
            found = KubernetesJob(name="single", namespace=namespace, gateway_url=url)  # the token is that of the job
            trainers = found.state(cached_path=None).workers.spawn_procs().spawn("trainers", Trainer)
            assert trainers.pod.call_one().get(timeout=60) == "single-workers-0"
            found._client.close()
            assert job._job is not None
            monkeypatch.setenv("MESHGATE_TOKEN", job._job.token)
            with pytest.raises(JobError, match=r"serves one job and creates none\. To use its job, omit compute="):
                KubernetesJob(compute=Compute(), namespace=namespace, gateway_url=url).apply()


def test_a_selector_without_matches(namespace: str) -> None:
    error = failure(KubernetesJob(selector={"app": "none"}, name="empty", namespace=namespace))
    assert f"no pod in namespace '{namespace}' matches the selector 'app=none'" in error


@pytest.mark.parametrize(
    ("compute", "text"),
    [
        (Compute(volumes=[{"mountPath": "/data", "hostPath": {"path": "../data"}}]), "must not contain '..'"),
        (Compute(pod_spec={"containers": [{"name": "worker", "imagePullPolicy": "Sometimes"}]}), "imagePullPolicy"),
    ],
    ids=["an invalid volume", "an invalid value"],
)
def test_an_invalid_pod(namespace: str, compute: Compute, text: str) -> None:
    error = failure(KubernetesJob(compute=compute, name="impossible", namespace=namespace))
    assert 'statefulset impossible-workers: FailedCreate: Pod "impossible-workers-0" is invalid' in error
    assert text in error


def test_an_invalid_workload(namespace: str) -> None:
    compute = Compute(pod_spec={"restartPolicy": "Never"})
    error = failure(KubernetesJob(compute=compute, name="impossible", namespace=namespace))
    assert 'StatefulSet.apps "impossible-workers" is invalid' in error
    assert 'restartPolicy: Unsupported value: "Never"' in error


def test_an_invalid_template(namespace: str) -> None:
    job = KubernetesJob(name="notemplate", namespace=namespace)
    job.add_mesh("workers", 1, pod_spec={"containers": [{"image": "x"}]})
    error = failure(job)
    assert 'Pod "notemplate-workers-0" is invalid: spec.containers[0].name: Required value' in error


def test_apply_and_kill_are_idempotent(namespace: str, kubectl: Kubectl, images: tuple[str, str]) -> None:
    job = KubernetesJob(name="twice", namespace=namespace)
    job.add_mesh("workers", 1, image_spec=ImageSpec(images[1]))
    job.apply()
    pod = "jsonpath={.items[0].metadata.uid}"
    first = kubectl("get", "pods", "-l", "meshgate.dev/job=twice", "-o", pod)
    job.apply()
    assert kubectl("get", "pods", "-l", "meshgate.dev/job=twice", "-o", pod) == first
    job.kill()
    job.kill()


def test_two_laptops_that_start_the_same_job_share_it(namespace: str, kubectl: Kubectl) -> None:
    laptops = [KubernetesJob(compute=Compute(), name="both", namespace=namespace) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda job: job.apply(), laptops))
    one, other = laptops
    try:
        trainers = one.state(cached_path=None).workers.spawn_procs().spawn("trainers", Trainer)
        assert trainers.pod.call_one().get(timeout=60) == "both-workers-0"
        trainers = other.state(cached_path=None).workers.spawn_procs().spawn("trainers", Trainer)
        assert trainers.pod.call_one().get(timeout=60) == "both-workers-0"
    finally:
        one.kill()
    other.kill()


def test_a_job_that_another_laptop_ended(namespace: str) -> None:
    job = KubernetesJob(compute=Compute(), name="ended", namespace=namespace)
    job.apply()
    trainers = job.state(cached_path=None).workers.spawn_procs().spawn("trainers", Trainer)
    trainers.pod.call_one().get(timeout=60)
    elsewhere = KubernetesJob(name="ended", namespace=namespace)
    elsewhere.apply()
    elsewhere.kill()
    with pytest.raises(GatewayLostError, match="the job was deleted"):
        trainers.pod.call_one().get(timeout=30)
    with pytest.raises(GatewayLostError, match=r"job 'ended' .* is gone: the job was deleted.*apply the job again"):
        job.state(cached_path=None)
    with pytest.raises(JobNotRunning, match="there is no job 'ended' in namespace"):
        KubernetesJob(name="ended", namespace=namespace).state(cached_path=None)
    job.kill()


def test_the_next_program_completes_the_job_of_a_killed_one(namespace: str, tmp_path: Path) -> None:
    program = f"""
        import os
        from meshgate import Compute, KubernetesJob
        from meshgate_kubernetes.jobs import objects
        objects.create_owned = lambda *arguments: os.kill(os.getpid(), 9)
        KubernetesJob(compute=Compute(), name="begun", namespace={namespace!r}).apply()
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == -9
    with KubernetesJob(compute=Compute(), name="begun", namespace=namespace) as job:
        trainers = job.state().workers.spawn_procs().spawn("trainers", Trainer)
        assert trainers.pod.call_one().get(timeout=60) == "begun-workers-0"


def test_every_image_that_cannot_be_pulled_is_named_at_once(namespace: str) -> None:
    job = KubernetesJob(name="unpullable", namespace=namespace, gateway=Compute(image="missing.invalid/gateway:1"))
    for mesh in ("trainers", "dataloaders"):
        job.add_mesh(mesh, 1, compute=Compute(image=f"missing.invalid/{mesh}:1"))
    error = failure(job)
    for image in ("gateway", "trainers", "dataloaders"):
        (line,) = (line for line in error.splitlines() if f"missing.invalid/{image}:1" in line)
        assert "pod unpullable-" in line
