"""The Kubernetes objects of a job, their owner and their network policies."""

from __future__ import annotations

import json

from meshgate_kubernetes.manifests.job_objects import (
    gateway_objects,
    gateway_rules,
    mesh_objects,
    monarch_mesh_name,
    owned_by,
    parent,
    token_secret,
)
from meshgate_kubernetes.manifests.names import JOB_LABEL, Names
from meshgate_kubernetes.manifests.spec import GatewaySpec, JobSpec
from meshgate_wire.proof import engines_key
from tests.clusters.kubernetes.objects import Object, found_mesh, job, mesh


def objects_of(spec: JobSpec) -> list[Object]:
    made = {**parent(spec), "metadata": {**parent(spec)["metadata"], "uid": "1"}}
    objects = [token_secret(spec, "secret"), *gateway_objects(spec)]
    objects += [obj for each in spec.meshes for obj in mesh_objects(spec, each)]
    return [made, *owned_by(made, objects)]


def test_the_parent_owns_every_object() -> None:
    first, *others = objects_of(job())
    assert first["kind"] == "ConfigMap"
    for obj in others:
        assert obj["metadata"]["labels"][JOB_LABEL] == "trainer"
        assert obj["metadata"]["namespace"] == "team"
        (owner,) = obj["metadata"]["ownerReferences"]
        assert owner == {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "name": "trainer",
            "uid": "1",
            "blockOwnerDeletion": True,
        }
    assert len({(obj["kind"], obj["metadata"]["name"]) for obj in others}) == len(others)


def test_the_parent_stores_the_specification_without_the_token() -> None:
    spec = job(idle_timeout=60)
    assert JobSpec.model_validate(json.loads(parent(spec)["data"]["job.json"])) == spec
    with_token = [obj for obj in objects_of(spec) if "secret" in json.dumps(obj).replace("secretKeyRef", "")]
    assert [obj["kind"] for obj in with_token if obj.get("stringData")] == ["Secret"]


def test_api_versions_are_served_by_old_and_new_releases() -> None:
    monarch = mesh().model_copy(update={"way": "monarchmesh"})
    versions = {obj["apiVersion"] for spec in (job(), job(monarch)) for obj in objects_of(spec)}
    assert versions - {"policy/v1"} == {
        "v1",
        "apps/v1",
        "networking.k8s.io/v1",
        "rbac.authorization.k8s.io/v1",
        "monarch.pytorch.org/v1alpha1",
    }


def test_the_gateway_has_a_read_only_root_and_minimal_permissions() -> None:
    (deployment,) = (obj for obj in gateway_objects(job()) if obj["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    assert gateway_rules(Names("trainer")) == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
        {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["trainer"], "verbs": ["get", "delete"]},
        {"apiGroups": [""], "resources": ["events"], "verbs": ["list", "watch"]},
    ]


def test_network_policies_admit_others_only_to_the_gateways_port() -> None:
    policies = [obj for obj in objects_of(job()) if obj["kind"] == "NetworkPolicy"]
    gateway, workers = policies
    own = {"podSelector": {"matchLabels": {JOB_LABEL: "trainer"}}}
    assert gateway["spec"]["ingress"] == [
        {"ports": [{"port": 8650, "protocol": "TCP"}, {"port": 8651, "protocol": "TCP"}]},
        {"from": [own]},
    ]
    assert workers["spec"]["ingress"] == [{"from": [own]}]
    assert workers["spec"]["podSelector"]["matchLabels"]["meshgate.dev/mesh"] == "workers"


def test_workers_start_in_parallel_and_resolve_each_other_before_they_are_ready() -> None:
    spec = job()
    kinds = {obj["kind"]: obj for obj in mesh_objects(spec, spec.meshes[0])}
    assert kinds["StatefulSet"]["spec"]["podManagementPolicy"] == "Parallel"
    assert kinds["Service"]["spec"]["clusterIP"] == "None"
    assert kinds["Service"]["spec"]["publishNotReadyAddresses"] is True


def test_routes_of_the_gateway_api_see_that_the_gateway_speaks_websocket() -> None:
    (service,) = (obj for obj in gateway_objects(job()) if obj["kind"] == "Service")
    assert [(port["port"], port["appProtocol"]) for port in service["spec"]["ports"]] == [(8650, "kubernetes.io/ws")]


def test_existing_pods_need_no_objects() -> None:
    assert mesh_objects(job(found_mesh()), found_mesh()) == []


def test_a_monarch_mesh_has_a_valid_name_and_no_labels_of_its_operator() -> None:
    monarch = mesh(labels={"team": "a"}).model_copy(update={"way": "monarchmesh", "labels": {"team": "b"}})
    spec = job(monarch, name="my-job")
    (made,) = (obj for obj in mesh_objects(spec, monarch) if obj["kind"] == "MonarchMesh")
    assert made["metadata"]["name"] == monarch_mesh_name("my-job", "workers")
    assert made["metadata"]["name"].isalnum()
    assert made["metadata"]["labels"]["team"] == "b"
    assert made["spec"]["podTemplate"]["metadata"]["labels"]["team"] == "a"
    assert "app.kubernetes.io/name" not in made["spec"]["podTemplate"]["metadata"]["labels"]
    assert monarch_mesh_name("my-job", "workers") != monarch_mesh_name("myjob", "workers")
    assert len(monarch_mesh_name("x" * 40, "y" * 20)) <= 52
    assert len(monarch_mesh_name("x", "y" * 50)) <= 52


def test_the_kueue_queue_is_a_label_of_the_stateful_set() -> None:
    spec = job(mesh(queue_name="research"))
    (made,) = (obj for obj in mesh_objects(spec, spec.meshes[0]) if obj["kind"] == "StatefulSet")
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"


def test_a_disruption_budget_covers_exactly_the_gateway_pod_and_allows_no_eviction() -> None:
    objects = {obj["kind"]: obj for obj in gateway_objects(job())}
    budget, deployment = objects["PodDisruptionBudget"], objects["Deployment"]
    assert budget["spec"] == {"maxUnavailable": 0, "selector": deployment["spec"]["selector"]}
    assert budget["apiVersion"] == "policy/v1"


REPLACEABLE = job(gateway=GatewaySpec(replicas=2))


def named(kind: str) -> dict[str, Object]:
    return {obj["metadata"]["name"]: obj["spec"] for obj in objects_of(REPLACEABLE) if obj["kind"] == kind}


def test_gateways_that_forward_are_replaced_one_by_one_and_the_engines_stay() -> None:
    deployments, budgets = named("Deployment"), named("PodDisruptionBudget")
    gateways, engines = deployments["trainer-gateway"], deployments["trainer-engines"]
    assert (gateways["replicas"], gateways["strategy"]["type"]) == (2, "RollingUpdate")
    assert gateways["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert (engines["replicas"], engines["strategy"]) == (1, {"type": "Recreate"})
    for name, most in (("trainer-gateway", 1), ("trainer-engines", 0)):
        selector = deployments[name]["selector"]
        assert budgets[name] == {"maxUnavailable": most, "selector": selector}
        assert selector["matchLabels"].items() <= deployments[name]["template"]["metadata"]["labels"].items()


def test_clients_reach_the_gateways_that_forward_and_only_these_reach_the_engines() -> None:
    gateways = {"app.kubernetes.io/component": "forwarder", JOB_LABEL: "trainer"}
    assert named("Service")["trainer-gateway"]["selector"] == gateways
    policies = named("NetworkPolicy")
    assert policies["trainer-gateway"]["podSelector"] == {"matchLabels": gateways}
    assert policies["trainer-gateway"]["ingress"] == [{"ports": [{"port": 8650, "protocol": "TCP"}]}]
    own = {"podSelector": {"matchLabels": {JOB_LABEL: "trainer"}}}
    metrics = {"ports": [{"port": 8651, "protocol": "TCP"}]}
    assert policies["trainer-engines"]["ingress"] == [metrics, {"from": [own]}]


def test_the_engines_key_is_beside_the_token_where_gateways_forward() -> None:
    assert token_secret(REPLACEABLE, "secret")["stringData"] == {"token": "secret", "key": engines_key("secret")}
    assert token_secret(job(), "secret")["stringData"] == {"token": "secret"}
