"""The Role in docs/kubernetes.md is sufficient; a missing permission is reported before anything is created."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshgate import Compute, KubernetesJob
from meshgate.errors import JobStartFailed
from tests.kubernetes.actors import Trainer
from tests.kubernetes.cluster import Kubectl, kubeconfig_of, own_namespace
from tests.programs import ROOT


def documented_role() -> dict[str, Any]:
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    blocks = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)]
    (role,) = [block for block in blocks if isinstance(block, dict) and block["kind"] == "Role"]
    return dict(role)


@pytest.fixture
def user(namespace: str, kubectl: Kubectl, tmp_path: Path) -> Iterator[Path]:
    """The kubeconfig of a user bound to the role ``meshgate-user``."""
    binding = ("--role=meshgate-user", f"--serviceaccount={namespace}:ordinary")
    kubectl("create", "serviceaccount", "ordinary")
    kubectl("create", "rolebinding", "ordinary", *binding)
    yield kubeconfig_of(kubectl, "ordinary", tmp_path)
    kubectl("delete", "serviceaccount/ordinary", "rolebinding/ordinary")


@pytest.mark.parametrize("without", ["nothing", "events"])
def test_the_documented_role_is_sufficient(namespace: str, kubectl: Kubectl, user: Path, without: str) -> None:
    role = documented_role()
    role["rules"] = [rule for rule in role["rules"] if without not in rule["resources"]]
    with (
        kubectl.applied(role),
        KubernetesJob(compute=Compute(), name="ordinary", namespace=namespace, kubeconfig=user) as job,
    ):
        trainers = job.state().workers.spawn_procs().spawn("trainers", Trainer)
        assert trainers.pod.call_one().get(timeout=60) == "ordinary-workers-0"


def gateway_role() -> dict[str, Any]:
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    blocks = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)]
    (rules,) = [block for block in blocks if isinstance(block, list) and len(block) == 3]
    metadata = {"name": "gateways"}
    del rules[1]["resourceNames"]  # one account for the gateways of all jobs
    return {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": metadata, "rules": rules}


def bound(account: str, role_kind: str, role: str) -> list[dict[str, Any]]:
    """A ServiceAccount with a role."""
    group = "rbac.authorization.k8s.io"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account}},
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": account},
            "roleRef": {"apiGroup": group, "kind": role_kind, "name": role},
            "subjects": [{"kind": "ServiceAccount", "name": account}],
        },
    ]


def test_the_edit_role_suffices_with_an_account_for_gateways_and_a_quota_admits_the_pods(
    namespace: str, tmp_path: Path
) -> None:
    quota = {"hard": {"limits.memory": "10Gi", "requests.memory": "4Gi"}}
    compute = Compute(memory="1Gi", disk_size="1Gi", node_selector={"kubernetes.io/os": "linux"}, labels={"cost": "ml"})
    with own_namespace(f"{namespace}-edit") as kubectl:
        kubectl.apply(
            *bound("editor", "ClusterRole", "edit"),
            gateway_role(),
            *bound("gateways", "Role", "gateways"),
            {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "limits"}, "spec": quota},
        )
        options = {
            "name": "edited",
            "namespace": kubectl.namespace,
            "kubeconfig": kubeconfig_of(kubectl, "editor", tmp_path),
        }
        with pytest.raises(JobStartFailed, match=r"may not create roles\.rbac.*gateway=Compute\(service_account_name="):
            KubernetesJob(compute=compute, **options).apply()
        with KubernetesJob(compute=compute, gateway=Compute(service_account_name="gateways"), **options) as job:
            trainers = job.state().workers.spawn_procs().spawn("trainers", Trainer)
            assert trainers.pod.call_one().get(timeout=60) == "edited-workers-0"
            path = "jsonpath={.items[0].spec.nodeSelector} {.items[0].metadata.labels.cost}"
            pods = ("get", "pods", "-l", "meshgate.dev/job=edited,app.kubernetes.io/component=gateway")
            assert kubectl(*pods, "-o", path) == '{"kubernetes.io/os":"linux"} ml'


@pytest.mark.parametrize(
    ("verb", "resource"), [("delete", "configmaps"), ("create", "statefulsets"), ("get", "pods/portforward")]
)
def test_a_missing_verb_is_reported_before_anything_is_created(
    namespace: str, kubectl: Kubectl, user: Path, verb: str, resource: str
) -> None:
    role = documented_role()
    role["rules"] = [rule for each in role["rules"] for rule in _without(each, verb, resource)]
    with kubectl.applied(role):
        job = KubernetesJob(compute=Compute(), name="less", namespace=namespace, kubeconfig=user)
        with pytest.raises(JobStartFailed, match=f"may not {verb} {resource}.* in namespace '{namespace}'"):
            job.apply()
    assert kubectl("get", "events", "--field-selector=involvedObject.name=less-gateway", "-o", "name") == ""


def _without(rule: dict[str, Any], verb: str, resource: str) -> list[dict[str, Any]]:
    """The rule without one verb of one resource."""
    if resource not in rule["resources"]:
        return [rule]
    others = {**rule, "resources": [each for each in rule["resources"] if each != resource]}
    fewer = {**rule, "resources": [resource], "verbs": [each for each in rule["verbs"] if each != verb]}
    return [each for each in (others, fewer) if each["resources"] and each["verbs"]]
