"""The Role of docs/kubernetes.md suffices, and a right less is told before anything is made."""

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
from tests.kubernetes.cluster import Kubectl, kubeconfig_of
from tests.programs import ROOT


def documented_role() -> dict[str, Any]:
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    blocks = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)]
    (role,) = [block for block in blocks if isinstance(block, dict) and block["kind"] == "Role"]
    return dict(role)


@pytest.fixture
def user(namespace: str, kubectl: Kubectl, tmp_path: Path) -> Iterator[Path]:
    """The kubeconfig of a user who is bound to the role ``meshgate-user``."""
    binding = ("--role=meshgate-user", f"--serviceaccount={namespace}:ordinary")
    kubectl("create", "serviceaccount", "ordinary")
    kubectl("create", "rolebinding", "ordinary", *binding)
    yield kubeconfig_of(kubectl, "ordinary", tmp_path)
    kubectl("delete", "serviceaccount/ordinary", "rolebinding/ordinary")


def test_the_role_of_the_documents_is_all_that_a_job_takes(namespace: str, kubectl: Kubectl, user: Path) -> None:
    with (
        kubectl.applied(documented_role()),
        KubernetesJob(compute=Compute(), name="ordinary", namespace=namespace, kubeconfig=user) as job,
    ):
        trainers = job.state().workers.spawn_procs().spawn("trainers", Trainer)
        assert trainers.pod.call_one().get(timeout=60) == "ordinary-workers-0"


@pytest.mark.parametrize(
    ("verb", "resource"), [("delete", "configmaps"), ("create", "statefulsets"), ("get", "pods/portforward")]
)
def test_one_verb_less_is_told_before_anything_is_made(
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
    """The rule less one verb of one resource."""
    if resource not in rule["resources"]:
        return [rule]
    others = {**rule, "resources": [each for each in rule["resources"] if each != resource]}
    fewer = {**rule, "resources": [resource], "verbs": [each for each in rule["verbs"] if each != verb]}
    return [each for each in (others, fewer) if each["resources"] and each["verbs"]]
