"""A job as objects: what is there, who owns it, and that the restricted profile would take it."""

from __future__ import annotations

import json

import pytest

from meshgate_gateway.settings import Settings, load_settings
from meshgate_kubernetes.manifests import (
    gateway_objects,
    gateway_rules,
    mesh_objects,
    monarch_mesh_name,
    owned_by,
    parent,
    token_secret,
)
from meshgate_kubernetes.names import JOB_LABEL, Names
from meshgate_kubernetes.spec import JobSpec, MeshSpec, VolumeMount
from tests.gateway.kubernetes.objects import Object, found_mesh, job, mesh


def objects_of(spec: JobSpec) -> list[Object]:
    made = {**parent(spec), "metadata": {**parent(spec)["metadata"], "uid": "1"}}
    objects = [token_secret(spec, "secret"), *gateway_objects(spec)]
    objects += [obj for each in spec.meshes for obj in mesh_objects(spec, each)]
    return [made, *owned_by(made, objects)]


def worker_pod(**worker: object) -> Object:
    spec = job(mesh(**worker))  # type: ignore[arg-type]
    (stateful_set,) = (obj for obj in mesh_objects(spec, spec.meshes[0]) if obj["kind"] == "StatefulSet")
    pod: Object = stateful_set["spec"]["template"]["spec"]
    return pod


def test_what_the_user_sets_in_the_environment_is_set_once_and_wins() -> None:
    environment = worker_pod(env_vars={"MONARCH_PORT": "1", "DATA": "/data"})["containers"][0]["env"]
    names = [each["name"] for each in environment]
    assert sorted(set(names)) == sorted(names)
    values = {each["name"]: each.get("value") for each in environment}
    assert (values["MONARCH_PORT"], values["DATA"]) == ("1", "/data")


def test_every_object_is_labelled_and_owned_by_the_parent() -> None:
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


def test_the_parent_holds_the_specification_and_not_the_token() -> None:
    spec = job(idle_timeout=60)
    assert JobSpec.model_validate(json.loads(parent(spec)["data"]["job.json"])) == spec
    with_token = [obj for obj in objects_of(spec) if "secret" in json.dumps(obj).replace("secretKeyRef", "")]
    assert [obj["kind"] for obj in with_token if obj.get("stringData")] == ["Secret"]


def test_the_gateway_is_told_how_long_a_session_and_an_idle_job_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHGATE_TOKEN", "a-token-for-this-test")
    (deployment,) = (obj for obj in gateway_objects(job(idle_timeout=60, lease=90)) if obj["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    settings = load_settings(container["args"])
    assert (settings.idle_timeout, settings.lease) == (60, 90)


def test_the_lease_of_a_job_is_by_default_that_of_a_gateway() -> None:
    assert job().lease == Settings.model_fields["lease"].default


def test_only_api_versions_that_old_and_new_releases_serve_are_used() -> None:
    monarch = mesh().model_copy(update={"way": "monarchmesh"})
    versions = {obj["apiVersion"] for spec in (job(), job(monarch)) for obj in objects_of(spec)}
    assert versions == {
        "v1",
        "apps/v1",
        "networking.k8s.io/v1",
        "rbac.authorization.k8s.io/v1",
        "monarch.pytorch.org/v1alpha1",
    }


@pytest.mark.parametrize("pod_of", ["gateway", "worker"])
def test_pods_are_what_the_restricted_profile_admits(pod_of: str) -> None:
    spec = job()
    (deployment,) = (obj for obj in gateway_objects(spec) if obj["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"] if pod_of == "gateway" else worker_pod()
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert {"hostNetwork", "hostPID", "hostIPC"}.isdisjoint(pod)
    assert all(set(volume) <= {"name", "emptyDir"} for volume in pod["volumes"])


def test_the_gateway_has_a_read_only_root_and_only_the_rights_it_needs() -> None:
    (deployment,) = (obj for obj in gateway_objects(job()) if obj["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    assert gateway_rules(Names("trainer")) == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
        {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["trainer"], "verbs": ["get", "delete"]},
    ]


def test_from_outside_only_the_gateways_port_can_be_reached() -> None:
    policies = [obj for obj in objects_of(job()) if obj["kind"] == "NetworkPolicy"]
    gateway, workers = policies
    own = {"podSelector": {"matchLabels": {JOB_LABEL: "trainer"}}}
    assert gateway["spec"]["ingress"] == [{"ports": [{"port": 8650, "protocol": "TCP"}]}, {"from": [own]}]
    assert workers["spec"]["ingress"] == [{"from": [own]}]
    assert workers["spec"]["podSelector"]["matchLabels"]["meshgate.dev/mesh"] == "workers"


def test_workers_start_together_and_find_each_other_before_they_are_ready() -> None:
    spec = job()
    kinds = {obj["kind"]: obj for obj in mesh_objects(spec, spec.meshes[0])}
    assert kinds["StatefulSet"]["spec"]["podManagementPolicy"] == "Parallel"
    assert kinds["Service"]["spec"]["clusterIP"] == "None"
    assert kinds["Service"]["spec"]["publishNotReadyAddresses"] is True


def test_nothing_is_made_for_pods_that_exist() -> None:
    assert mesh_objects(job(found_mesh()), found_mesh()) == []


def test_a_monarch_mesh_has_a_name_that_its_crd_takes_and_no_label_that_its_operator_sets() -> None:
    asked = mesh(labels={"team": "a"}).model_copy(update={"way": "monarchmesh", "labels": {"team": "b"}})
    spec = job(asked, name="my-job")
    (made,) = (obj for obj in mesh_objects(spec, asked) if obj["kind"] == "MonarchMesh")
    assert made["metadata"]["name"] == monarch_mesh_name("my-job", "workers")
    assert made["metadata"]["name"].isalnum()
    assert made["metadata"]["labels"]["team"] == "b"
    assert made["spec"]["podTemplate"]["metadata"]["labels"]["team"] == "a"
    assert "app.kubernetes.io/name" not in made["spec"]["podTemplate"]["metadata"]["labels"]
    assert monarch_mesh_name("my-job", "workers") != monarch_mesh_name("myjob", "workers")
    assert len(monarch_mesh_name("x" * 40, "y" * 20)) <= 52
    assert len(monarch_mesh_name("x", "y" * 50)) <= 52


def test_the_queue_of_kueue_is_a_label_of_the_stateful_set() -> None:
    spec = job(mesh(queue_name="research"))
    (made,) = (obj for obj in mesh_objects(spec, spec.meshes[0]) if obj["kind"] == "StatefulSet")
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"


def test_resources_are_limited_but_for_cpu() -> None:
    pod = worker_pod(cpu="4", memory="8Gi", disk_size="10Gi", gpus=2, resources={"rdma/hca": "1"})
    resources = pod["containers"][0]["resources"]
    limits = {"memory": "8Gi", "ephemeral-storage": "10Gi", "nvidia.com/gpu": "2", "rdma/hca": "1"}
    assert resources == {"limits": limits, "requests": {"cpu": "4", **limits}}


def test_where_a_pod_may_run() -> None:
    pod = worker_pod(
        gpus=1, gpu_type="A100", node_selector={"zone": "a"}, tolerations=({"key": "gpu", "operator": "Exists"},)
    )
    assert pod["nodeSelector"] == {"zone": "a", "nvidia.com/gpu.product": "A100"}
    assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert worker_pod(gpus=1, gpu_type="accelerator=h100")["nodeSelector"] == {"accelerator": "h100"}


def test_volumes_and_shared_memory() -> None:
    mount = VolumeMount(mount_path="/data", source={"persistentVolumeClaim": {"claimName": "data"}}, read_only=True)
    pod = worker_pod(volumes=(mount,), shared_memory_limit="1Gi")
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}} in pod["volumes"]
    assert {"name": "volume-0", "persistentVolumeClaim": {"claimName": "data"}} in pod["volumes"]
    mounts = pod["containers"][0]["volumeMounts"]
    assert {"name": "volume-0", "mountPath": "/data", "readOnly": True} in mounts


def test_a_raw_pod_spec_is_laid_over_what_the_rest_makes() -> None:
    raw = {
        "hostNetwork": True,
        "securityContext": {"runAsUser": 0},
        "containers": [
            {"name": "worker", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]},
            {"name": "sidecar", "image": "busybox"},
        ],
    }
    pod = worker_pod(pod_spec=raw)
    worker, sidecar = pod["containers"]
    assert pod["hostNetwork"] is True
    assert pod["securityContext"]["runAsUser"] == 0
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert worker["image"] == "worker:1"
    assert [each["name"] for each in worker["env"]][-1] == "NCCL_DEBUG"
    assert sidecar == {"name": "sidecar", "image": "busybox"}


def test_a_whole_template_is_taken_as_it_is_but_for_the_labels() -> None:
    template = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "mine", "image": "x"}]}}
    spec = job(mesh(template=template))
    (made,) = (obj for obj in mesh_objects(spec, spec.meshes[0]) if obj["kind"] == "StatefulSet")
    assert made["spec"]["template"]["spec"] == template["spec"]
    assert made["spec"]["template"]["metadata"]["labels"]["a"] == "b"
    assert made["spec"]["template"]["metadata"]["labels"][JOB_LABEL] == "trainer"


def test_two_meshes_do_not_share_a_name() -> None:
    with pytest.raises(ValueError, match="meshes named twice: workers"):
        job(mesh(), mesh())


def test_a_mesh_of_made_pods_needs_a_worker_and_one_of_found_pods_has_none() -> None:
    with pytest.raises(ValueError, match="a worker is for pods that are made"):
        MeshSpec(name="workers", replicas=1, way="statefulset", selector="a=b")
    with pytest.raises(ValueError, match="replicas must be at least 1"):
        mesh(replicas=0)
    with pytest.raises(ValueError, match="every pod of the namespace"):
        found_mesh(selector=" ")
