"""A job that cannot come up says why, as soon as waiting is hopeless, and leaves nothing behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshgate import Compute, Image, KubernetesJob
from meshgate.errors import JobStartFailed
from tests.kubernetes.cluster import Kubectl, kubeconfig_of

SOON = 60.0  # seconds; without stopping early these would take the job's 15 minutes


@contextmanager
def refused(within: float = SOON) -> Iterator[pytest.ExceptionInfo[JobStartFailed]]:
    started = time.monotonic()
    with pytest.raises(JobStartFailed) as caught:
        yield caught
    assert time.monotonic() - started < within


def start(compute: Compute, namespace: str, name: str, **options: object) -> None:
    with KubernetesJob(compute=compute, name=name, namespace=namespace, **options) as job:  # type: ignore[arg-type]
        job.apply()


def test_an_image_that_does_not_exist(namespace: str) -> None:
    image = Image().from_docker("localhost/no-such-image:1")
    with refused() as caught:
        start(Compute(image=image), namespace, "noimage")
    assert "pod noimage-workers-0: ErrImagePull" in str(caught.value) or "ImagePullBackOff" in str(caught.value)
    assert "localhost/no-such-image:1" in str(caught.value)


def test_a_name_that_no_image_can_have(namespace: str) -> None:
    with refused() as caught:
        start(Compute(image="Not An Image"), namespace, "badname")
    assert "InvalidImageName" in str(caught.value)


def test_gpus_that_no_node_has(namespace: str) -> None:
    with refused() as caught:
        start(Compute(gpus=8), namespace, "nogpus")
    assert "Insufficient nvidia.com/gpu: it asks for 8, the largest node has 0 (8 short)" in str(caught.value)


@pytest.mark.disturbing
def test_gpus_that_a_node_has(namespace: str, kubectl: Kubectl, two_gpus: None) -> None:
    with KubernetesJob(compute=Compute(gpus=1, replicas=2), name="gpus", namespace=namespace) as job:
        job.apply()
        asked = kubectl("get", "pod", "gpus-workers-1", "-o", "jsonpath={.spec.containers[0].resources.limits}")
        assert '"nvidia.com/gpu":"1"' in asked
    with refused() as caught:
        start(Compute(gpus=3), namespace, "more")
    assert "it asks for 3, the largest node has 2 (1 short)" in str(caught.value)


def test_a_quota_that_is_used_up(namespace: str, kubectl: Kubectl) -> None:
    space = f"{namespace}-quota"
    kubectl("create", "namespace", space)
    try:
        quota = {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "small", "namespace": space},
            "spec": {"hard": {"pods": "1"}},
        }
        Kubectl(space).wait_for_account()
        Kubectl(space).apply(quota)
        with refused() as caught:
            start(Compute(replicas=2), space, "crowd")
        assert "QuotaExceeded: quota small leaves no room" in str(caught.value)
        assert "pods=1" in str(caught.value)
        assert Kubectl(space)("get", "all,configmap,secret", "-l", "meshgate.dev/job", "-o", "name") == ""
    finally:
        kubectl("delete", "namespace", space, timeout=240)


def test_a_pod_that_admission_refuses(namespace: str, kubectl: Kubectl) -> None:
    space = f"{namespace}-limited"
    limits = {
        "apiVersion": "v1",
        "kind": "LimitRange",
        "metadata": {"name": "small", "namespace": space},
        "spec": {"limits": [{"type": "Container", "max": {"memory": "2Gi"}}]},
    }
    kubectl("create", "namespace", space)
    try:
        Kubectl(space).wait_for_account()
        Kubectl(space).apply(limits)
        with refused() as caught:
            start(Compute(memory="3Gi"), space, "large")
        assert "statefulset large-workers: FailedCreate" in str(caught.value)
        assert "maximum memory usage per Container is 2Gi, but limit is 3Gi" in str(caught.value)
        assert Kubectl(space)("get", "all,configmap,secret", "-l", "meshgate.dev/job", "-o", "name") == ""
    finally:
        kubectl("delete", "namespace", space, timeout=240)


def test_a_worker_that_crashes_shows_its_last_lines(namespace: str, images: tuple[str, str]) -> None:
    pod_spec = {
        "containers": [
            {
                "name": "worker",
                "command": ["python", "-c", "print('reading the config'); exit('no config')"],
            }
        ]
    }
    with refused() as caught:
        start(Compute(pod_spec=pod_spec), namespace, "crash")
    told = str(caught.value)
    assert "CrashLoopBackOff: container worker ended with exit code 1" in told
    assert "reading the config" in told
    assert "no config" in told


def test_a_worker_that_needs_more_memory_than_it_has(namespace: str) -> None:
    hungry = "x = bytearray(900 << 20); x[::4096] = b'x' * len(x[::4096]); import time; time.sleep(60)"
    pod_spec = {"containers": [{"name": "worker", "command": ["python", "-c", hungry]}]}
    with refused() as caught:
        start(Compute(memory="64Mi", pod_spec=pod_spec), namespace, "oom")
    assert "OOMKilled" in str(caught.value)
    assert "limit of 64Mi" in str(caught.value)


def test_an_image_without_torchmonarch_says_so(namespace: str) -> None:
    pod_spec = {"containers": [{"name": "worker", "env": [{"name": "PATH", "value": "/usr/local/bin:/usr/bin:/bin"}]}]}
    with refused() as caught:
        start(Compute(pod_spec=pod_spec), namespace, "nomonarch")
    assert "holds neither meshgate[worker] nor torchmonarch" in str(caught.value)


def test_a_secret_that_is_not_there(namespace: str) -> None:
    with refused() as caught:
        start(Compute(secrets=["no-such-secret"]), namespace, "nosecret")
    assert "CreateContainerConfigError" in str(caught.value)
    assert "no-such-secret" in str(caught.value)


def test_a_timeout_names_what_was_not_ready(namespace: str) -> None:
    pod_spec = {"containers": [{"name": "worker", "command": ["sleep", "600"]}]}
    with refused() as caught:
        start(Compute(replicas=2, pod_spec=pod_spec), namespace, "slow", timeout=15)
    assert "within 15 s; not ready: slow-workers-0, slow-workers-1" in str(caught.value)


def test_a_kubeconfig_without_rights_names_them(namespace: str, kubectl: Kubectl, tmp_path: Path) -> None:
    kubectl("create", "serviceaccount", "stranger")
    try:
        kubeconfig = kubeconfig_of(kubectl, "stranger", tmp_path)
        with refused() as caught:
            start(Compute(), namespace, "norights", kubeconfig=str(kubeconfig))
        assert f"system:serviceaccount:{namespace}:stranger may not create configmaps" in str(caught.value)
        assert f"in namespace '{namespace}'" in str(caught.value)
    finally:
        kubectl("delete", "serviceaccount", "stranger")


def test_some_rights_that_are_missing_are_all_named(namespace: str, kubectl: Kubectl, tmp_path: Path) -> None:
    kubectl("create", "serviceaccount", "halfway")
    kubectl("create", "role", "halfway", "--verb=*", "--resource=configmaps,pods,secrets")
    kubectl("create", "rolebinding", "halfway", "--role=halfway", f"--serviceaccount={namespace}:halfway")
    try:
        kubeconfig = kubeconfig_of(kubectl, "halfway", tmp_path)
        with refused() as caught:
            start(Compute(), namespace, "halfway", kubeconfig=str(kubeconfig))
        told = str(caught.value)
        assert "may not create serviceaccounts" in told
        assert "roles.rbac.authorization.k8s.io" in told
        assert "statefulsets.apps" in told
    finally:
        kubectl("delete", "serviceaccount/halfway", "role/halfway", "rolebinding/halfway")


def test_a_token_that_has_expired(namespace: str, kubectl: Kubectl, tmp_path: Path) -> None:
    kubectl("create", "serviceaccount", "gone")
    kubeconfig = kubeconfig_of(kubectl, "gone", tmp_path)
    kubectl("delete", "serviceaccount", "gone")
    while Kubectl(namespace, kubeconfig).knows_the_user():  # the API server remembers a good token for seconds
        pass
    with refused() as caught:
        start(Compute(), namespace, "expired", kubeconfig=str(kubeconfig))
    assert "does not accept the credentials" in str(caught.value)
    assert "expired" in str(caught.value)
