"""A gateway accepts Kubernetes identities that may exec into the job's pods; others get the missing permission."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from meshgate import Client, Compute, KubernetesJob, UrlDialer
from tests.kubernetes.actors import Trainer
from tests.kubernetes.cluster import Kubectl
from tests.kubernetes.network import local_port


@pytest.fixture(scope="module", params=[1, 2], ids=["one pod", "gateways that forward"])
def gateway(request: pytest.FixtureRequest, namespace: str, kubectl: Kubectl) -> Iterator[int]:
    """The local port of a job's gateway."""
    replicas = Compute(replicas=request.param)
    with KubernetesJob(compute=Compute(), gateway=replicas, name="guarded", namespace=namespace) as job:
        job.apply()
        with local_port(kubectl, "service/guarded-gateway") as port:
            yield port


@pytest.fixture
def delegated(namespace: str, kubectl: Kubectl) -> Iterator[None]:
    """The gateway's account may review tokens and access."""
    binding = f"meshgate-test-{namespace}"
    account = f"--serviceaccount={namespace}:guarded-gateway"
    kubectl("create", "clusterrolebinding", binding, "--clusterrole=system:auth-delegator", account)
    yield
    kubectl("delete", "clusterrolebinding", binding)


@pytest.fixture
def account(kubectl: Kubectl) -> Iterator[str]:
    """The token of a service account without permissions, named someone."""
    kubectl("create", "serviceaccount", "someone")
    yield kubectl.token_of("someone")
    kubectl("delete", "serviceaccount", "someone")


def denied(port: int, token: str) -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/job", headers={"Authorization": f"Bearer {token}"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=20)
    with caught.value:
        return caught.value.code, json.load(caught.value)["error"]


def test_an_identity_that_may_exec_into_pods_gets_a_session(
    namespace: str, kubectl: Kubectl, gateway: int, delegated: None, account: str
) -> None:
    kubectl("create", "role", "runner", "--verb=create", "--resource=pods/exec")
    kubectl("create", "rolebinding", "runner", "--role=runner", f"--serviceaccount={namespace}:someone")
    try:
        with Client.connect(UrlDialer(f"ws://127.0.0.1:{gateway}", account)) as client:
            trainers = client.attach_hosts("workers", 1).spawn_procs().spawn("trainers", Trainer)
            assert trainers.pod.call_one().get(timeout=60) == "guarded-workers-0"
        gateways = ("-l", "meshgate.dev/job=guarded,!meshgate.dev/mesh", "--tail=-1")
        events = [json.loads(line) for line in kubectl("logs", *gateways).splitlines()]
        started = [event for event in events if event["event"] == "audit" and event["action"] == "session"]
        someone = f"kubernetes:system:serviceaccount:{namespace}:someone"
        assert [(event["outcome"], event["caller"]) for event in started] == [("allowed", someone)]
    finally:
        kubectl("delete", "role/runner", "rolebinding/runner")


def test_an_identity_without_permission_gets_the_missing_verb(
    namespace: str, gateway: int, delegated: None, account: str
) -> None:
    status, error = denied(gateway, account)
    assert status == 403
    assert f"system:serviceaccount:{namespace}:someone may not create pods/exec in namespace {namespace!r}" in error


def test_a_forged_token_is_denied(gateway: int, delegated: None) -> None:
    forged = base64.urlsafe_b64encode(b'{"alg":"RS256"}').decode() + ".e30.c2ln"
    assert denied(gateway, forged)[0] == 401


def test_a_gateway_without_the_reviewer_role_names_it(gateway: int, account: str) -> None:
    status, error = denied(gateway, account)
    assert status == 401
    assert "system:auth-delegator" in error
