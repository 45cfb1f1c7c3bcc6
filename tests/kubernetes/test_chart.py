"""The Helm chart installs a provisioning gateway, whose upgrade and rollback leave the sessions of jobs alone."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from meshgate import Compute, Future, KubernetesJob
from meshgate.errors import JobStartFailed
from meshgate.jobs.kubernetes.remote_gateway import RemoteGateway
from tests.chart import CHART, HELM, helm
from tests.kubernetes.actors import Trainer
from tests.kubernetes.cluster import KINDS, Kubectl
from tests.kubernetes.network import local_port
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not installed")
LIMIT = 180  # seconds: an old kubelet may take a minute to report that the pod which is replaced has gone


def values(namespace: str, images: tuple[str, str], *callers: str) -> dict[str, Any]:
    repository, _, tag = images[0].rpartition(":")
    return {
        "image": {"repository": repository, "tag": tag},
        "policy": {
            "callers": [f"system:serviceaccount:{namespace}:{each}" for each in callers],
            "namespaces": [namespace],
            "images": [images[1]],
        },
    }


@contextmanager
def calling(call: Callable[[], Future[str]]) -> Iterator[set[str]]:
    """Calls one after the other during the block. At its end, it has what they returned; fails if one has failed."""
    returned: set[str] = set()
    ended = threading.Event()

    def call_until_ended() -> None:
        while not ended.is_set():
            returned.add(call().get(timeout=LIMIT))

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(call_until_ended)
        try:
            yield returned
        finally:
            ended.set()
    running.result()


def refusal(namespace: str, url: str, token: str) -> str:
    """Why the caller with this token gets no job with an image that no policy allows."""
    job = KubernetesJob(compute=Compute(image="evil.example/x:1"), namespace=namespace)
    with pytest.raises(JobStartFailed) as caught:
        RemoteGateway(url, token).start(job._request)
    return str(caught.value)


@pytest.mark.slow
def test_calls_go_on_while_an_upgrade_admits_a_user_and_a_rollback_takes_that_back(
    namespace: str, kubectl: Kubectl, images: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    release = ("team", f"--namespace={namespace}", "--wait", f"--timeout={LIMIT}s")
    kubectl("create", "secret", "generic", "meshgate", f"--from-literal=token={secrets.token_hex(24)}")
    for account in ("alice", "bob"):
        kubectl("create", "serviceaccount", account)
    bob = kubectl.token_of("bob")
    monkeypatch.setenv("MESHGATE_TOKEN", kubectl.token_of("alice"))
    try:
        notes = helm("install", *release, str(CHART), values=values(namespace, images, "alice"), timeout=LIMIT)
        assert f"kubectl -n {namespace} rollout status deployment/team-meshgate" in notes
        assert "create secret" not in notes  # it exists
        with local_port(kubectl, "service/team-meshgate") as port:
            url = f"http://127.0.0.1:{port}"
            assert "bob may not create statefulsets" in refusal(namespace, url, bob)
            compute = Compute(memory="500Mi")
            with KubernetesJob(compute=compute, name="bychart", namespace=namespace, gateway_url=url) as job:
                trainer = job.state(cached_path=None).workers.spawn_procs().spawn("trainers", Trainer)
                with calling(trainer.process.call_one) as processes:
                    both = values(namespace, images, "alice", "bob")
                    helm("upgrade", *release, str(CHART), values=both, timeout=LIMIT)
                    assert "'evil.example/x:1' is not allowed" in refusal(namespace, url, bob)
                    helm("rollback", *release, timeout=LIMIT)
                    assert "bob may not create statefulsets" in refusal(namespace, url, bob)
                processes.add(trainer.process.call_one().get(timeout=LIMIT))  # through the third pod
                assert len(processes) == 1
    finally:
        helm("uninstall", *release, "--ignore-not-found", timeout=LIMIT)
        kubectl("delete", "secret/meshgate", "serviceaccount/alice", "serviceaccount/bob")
    of_release = ("-l", "app.kubernetes.io/instance=team", "-o", "name")
    kinds = f"{KINDS},clusterrolebinding"
    wait_for(lambda: kubectl("get", kinds, *of_release) == "", "the objects of the release to be gone", LIMIT)
