"""The Helm chart has the objects of the kustomize deployment, and refuses wrong values."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshgate_gateway.provisioning.policy import Policy
from meshgate_wire.handshake import SOFTWARE_VERSION
from tests.chart import CHART, HELM, by_name, helm
from tests.documents import code_blocks
from tests.programs import ROOT

pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not installed")

DEPLOYMENT = ROOT / "deploy" / "provisioning-gateway"
EXAMPLE = json.loads((DEPLOYMENT / "example" / "policy.json").read_text())
COMPONENTS = {  # of the kustomize deployment: the values for the same
    "ingress": {"ingress": {"enabled": True, "host": "meshgate.example.com"}},
    "httproute": {
        "httpRoute": {
            "enabled": True,
            "host": "meshgate.example.com",
            "parentRefs": [{"name": "gateway", "namespace": "gateways"}],
        }
    },
    "service-monitor": {"serviceMonitor": {"enabled": True}},
}
EVERYTHING: dict[str, Any] = {
    "fullnameOverride": "own-name",
    "policy": {"namespaces": ["space-of-policy"]},
    "image": {"repository": "own.registry/gateway", "tag": "own-tag", "pullPolicy": "Never"},
    "imagePullSecrets": [{"name": "own-registry"}],
    "tokenSecret": {"name": "own-secret", "key": "own-key"},
    "serviceAccount": {"create": True, "name": "own-account"},
    "rbac": {"create": True, "namespaces": ["further-space"], "clusterRoleBinding": True},
    "replicas": 0,
    "resources": {"requests": {"cpu": "123m"}, "limits": {"memory": "456Mi"}},
    "priorityClassName": "own-priority",
    "nodeSelector": {"own-label": "own-node"},
    "tolerations": [{"key": "own-taint", "operator": "Exists"}],
    "service": {"annotations": {"own-annotation": "of-service"}},
    "ingress": {
        "enabled": True,
        "className": "own-class",
        "annotations": {"own-annotation": "of-ingress"},
        "host": "own.host",
        "tlsSecret": "own-certificate",
    },
    "httpRoute": {"enabled": True, "host": "own.route", "parentRefs": [{"name": "own-parent"}]},
    "serviceMonitor": {"enabled": True, "labels": {"own-release": "of-monitor"}, "namespace": "own-monitoring"},
}
SWITCHES = {  # values that turn objects on and off: their kinds
    "serviceAccount.create": {"ServiceAccount"},
    "rbac.create": {"Role", "RoleBinding"},
    "rbac.clusterRoleBinding": {"ClusterRoleBinding"},
    "ingress.enabled": {"Ingress"},
    "httpRoute.enabled": {"HTTPRoute"},
    "serviceMonitor.enabled": {"ServiceMonitor"},
}
ALL_KINDS = {"ConfigMap", "Service", "Deployment", "NetworkPolicy"}.union(*SWITCHES.values())


def template(values: dict[str, Any], *options: str) -> dict[tuple[str, str], Any]:
    """The objects of a release named meshgate in the namespace training."""
    return by_name(helm("template", "meshgate", str(CHART), "--namespace=training", *options, values=values))


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(AssertionError) as caught:
        template(values)
    return str(caught.value)


def kustomized(directory: Path, *components: str) -> dict[tuple[str, str], Any]:
    """The objects of the example with these components."""
    shutil.copytree(DEPLOYMENT, directory / "deploy")
    file = directory / "deploy" / "example" / "kustomization.yaml"
    listed = f"components: [{', '.join(f'../components/{name}' for name in components)}]"
    file.write_text(file.read_text().replace("components: []", listed))
    done = subprocess.run(
        ["kubectl", "kustomize", file.parent], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    # The name of the ConfigMap ends with a hash of the policy, where the chart annotates the pod with one.
    return by_name(re.sub(r"\bmeshgate-policy-\w+", "meshgate-policy", done.stdout))


def compared(found: dict[tuple[str, str], Any]) -> dict[tuple[str, str], Any]:
    """The objects without their labels and the hash, and with the policy as data."""
    for (kind, _), each in found.items():
        each["metadata"].pop("labels", None)
        if kind == "Deployment":
            del each["spec"]["template"]["metadata"]["labels"]
            each["spec"]["template"]["metadata"].pop("annotations", None)
        elif kind == "ConfigMap":
            each["data"] = {name: json.loads(text) for name, text in each["data"].items()}
    return found


def labels(found: dict[tuple[str, str], Any]) -> Iterator[tuple[tuple[str, str], dict[str, str]]]:
    """Those of each object, and of the pod."""
    for name, each in found.items():
        yield name, each["metadata"].get("labels", {})
        if name[0] == "Deployment":
            yield ("Pod", name[1]), each["spec"]["template"]["metadata"]["labels"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl, which has kustomize, is not installed")
@pytest.mark.parametrize("components", [(), tuple(COMPONENTS)], ids=["example", "all components"])
def test_the_chart_has_the_objects_of_the_kustomize_example(components: tuple[str, ...], tmp_path: Path) -> None:
    values: dict[str, Any] = {"policy": {key: EXAMPLE[key] for key in EXAMPLE if key != "gateway_image"}}
    for name in components:
        values |= COMPONENTS[name]
    assert set(COMPONENTS) == {path.name for path in (DEPLOYMENT / "components").iterdir()}
    ours, theirs = template(values), kustomized(tmp_path, *components)
    own = dict(labels(ours))
    assert {name: own[name].items() >= each.items() for name, each in labels(theirs)} == dict.fromkeys(own, True)
    assert compared(ours) == compared(theirs)


@pytest.mark.parametrize(
    "values",
    [{}, EVERYTHING, *(yaml.safe_load(block.code) for block in code_blocks(ROOT / "docs" / "many_users.md", "yaml"))],
    ids=["defaults", "everything", "the guide to many users"],
)
def test_the_chart_has_no_findings(values: dict[str, Any]) -> None:
    helm("lint", "--strict", str(CHART), values=values)


def test_the_chart_has_the_version_of_meshgate() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert {chart["version"], chart["appVersion"]} == {SOFTWARE_VERSION}


def leaves(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What has no further keys, each with its path."""
    if isinstance(values, dict) and values:
        for key, each in values.items():
            yield from leaves(each, f"{path}.{key}")
    elif isinstance(values, list) and values:
        for each in values:
            yield from leaves(each, f"{path}[]")
    else:
        yield path, values


def test_every_documented_value_is_used() -> None:
    documented = yaml.safe_load((CHART / "values.yaml").read_text())
    given = dict(leaves(EVERYTHING))
    missing = [path for path, _ in leaves(documented) if not any(each.startswith(path) for each in given)]
    assert missing == [".resources.requests.memory", ".resources.limits.cpu"], "set new values in EVERYTHING"
    found = template(EVERYTHING)
    rendered = yaml.safe_dump_all(found.values())
    assert [text for text in given.values() if isinstance(text, str) and text not in rendered] == []
    assert found["Deployment", "own-name"]["spec"]["replicas"] == EVERYTHING["replicas"]
    assert {kind for kind, _ in found} == ALL_KINDS


@pytest.mark.parametrize("switch", SWITCHES)
def test_what_is_switched_off_is_left_out(switch: str) -> None:
    kinds = {kind for kind, _ in template(EVERYTHING, f"--set={switch}=false")}
    assert kinds == ALL_KINDS - SWITCHES[switch]


def test_the_role_is_bound_in_every_namespace_of_jobs() -> None:
    manifests = helm("template", "meshgate", str(CHART), "--namespace=training", "--set=rbac.namespaces={a,training}")
    roles = [each["metadata"] for each in yaml.safe_load_all(manifests) if each and each["kind"] == "Role"]
    assert sorted(role["namespace"] for role in roles) == ["a", "training"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replicas": 2}, "replicas must be one of the following: 0, 1"),
        ({"ingres": {"enabled": True}}, "Additional property ingres is not allowed"),
        ({"policy": {"calers": ["*"]}}, "policy: Additional property calers is not allowed"),
        ({"policy": {"max_idle": "1h"}}, "policy.max_idle: Invalid type. Expected: integer, given: string"),
        ({"tokenSecret": None}, "tokenSecret is required"),
        ({"nodeSelector": {"gpu": True}}, "nodeSelector.gpu: Invalid type. Expected: string, given: boolean"),
        ({"ingress": {"enabled": True}}, "ingress.host is empty: set the host"),
        ({"httpRoute": {"enabled": True, "host": "a.b"}}, "httpRoute.parentRefs is empty: name the Gateway"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_a_wrong_value_is_refused(values: dict[str, Any], message: str) -> None:
    assert message in refusal(values)


def plain(schema: dict[str, Any]) -> dict[str, Any]:
    """A field's schema without what does not concern an operator. Helm removes a value that is null."""
    (kind,) = [each for each in schema.get("anyOf", [schema]) if each.get("type") != "null"]
    return {key: value for key, value in kind.items() if key not in ("title", "default")}


def test_the_schema_accepts_the_policies_that_the_gateway_reads() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["policy"]
    fields = {name: plain(each) for name, each in Policy.model_json_schema()["properties"].items()}
    assert schema == {"type": "object", "additionalProperties": False, "properties": fields}


def test_the_schema_requires_every_documented_value() -> None:
    """Otherwise, a value that is set to null would be left out."""
    documented = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["required"] == list(documented)
    objects = {name: each for name, each in schema["properties"].items() if "required" in each}
    assert {name: each["required"] for name, each in objects.items()} == {
        name: list(documented[name]) for name in objects
    }


def pod_and_policy(values: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    found = template(values)
    policy = json.loads(found["ConfigMap", "meshgate-policy"]["data"]["policy.json"])
    return found["Deployment", "meshgate"]["spec"]["template"]["metadata"], policy


def test_a_changed_policy_replaces_the_pod() -> None:
    before, _ = pod_and_policy({"policy": EXAMPLE})
    after, _ = pod_and_policy({"policy": {**EXAMPLE, "callers": []}})
    same, _ = pod_and_policy({"policy": EXAMPLE, "service": {"annotations": {"a": "b"}}})
    assert before["annotations"] != after["annotations"]
    assert before == same


def test_the_policy_allows_no_more_than_the_values_say() -> None:
    given = {"submitters": [], "max_gpus_per_caller": 0, "max_idle": 60}
    _, policy = pod_and_policy({"policy": given, "image": {"repository": "own", "tag": "1"}})
    assert policy == {**given, "gateway_image": "own:1"}
    _, policy = pod_and_policy({"policy": {**given, "gateway_image": "other:2"}})
    assert policy["gateway_image"] == "other:2"


def test_another_chart_can_depend_on_it(tmp_path: Path) -> None:
    shutil.copytree(CHART, tmp_path / "charts" / "meshgate")
    (tmp_path / "Chart.yaml").write_text("{apiVersion: v2, name: platform, version: 1.0.0}")
    found = by_name(helm("template", "all", str(tmp_path), values={"meshgate": {"image": {"tag": "own"}}}))
    assert ("Deployment", "all-meshgate") in found
