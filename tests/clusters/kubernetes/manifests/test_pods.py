"""The pod templates of workers and gateway."""

from __future__ import annotations

import bz2
import io
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from meshgate_gateway.settings import Settings, load_settings
from meshgate_kubernetes.manifests import pods
from meshgate_kubernetes.manifests.names import JOB_LABEL
from meshgate_kubernetes.manifests.pods import (
    MONARCH_REQUIREMENT,
    PACKED_WHEEL,
    PYTHONPATH,
    SCRAPE,
    VERSIONS_PORT_OFFSET,
    WORKER_BOOTSTRAP,
    gateway_template,
    worker_template,
)
from meshgate_kubernetes.manifests.spec import GatewaySpec, VolumeMount
from meshgate_processes.marks import SYNC_AGENT
from tests.clusters.kubernetes.objects import Object, job, mesh
from tests.ports import free_port
from tests.programs import ROOT
from tests.waiting import wait_for


def worker_pod(**worker: object) -> Object:
    spec = job(mesh(**worker))  # type: ignore[arg-type]
    pod: Object = worker_template(spec, spec.meshes[0])["spec"]
    return pod


def test_the_users_environment_variables_take_precedence() -> None:
    environment = worker_pod(env_vars={"MONARCH_PORT": "1", "DATA": "/data"})["containers"][0]["env"]
    names = [each["name"] for each in environment]
    assert sorted(set(names)) == sorted(names)
    values = {each["name"]: each.get("value") for each in environment}
    assert (values["MONARCH_PORT"], values["DATA"]) == ("1", "/data")


@pytest.mark.parametrize(("grace", "notice"), [(None, "27"), (120, "117"), (0, "0")])
def test_a_worker_knows_for_how_long_its_processes_may_go_on_after_sigterm(grace: int | None, notice: str) -> None:
    given = {} if grace is None else {"terminationGracePeriodSeconds": grace}
    pod = worker_pod(pod_spec=given)
    assert pod["terminationGracePeriodSeconds"] == (30 if grace is None else grace)
    template = {"spec": {"containers": [{"name": "mine", "image": "x"}], **given}}
    for each in (pod, worker_pod(template=template)):
        values = {each["name"]: each.get("value") for each in each["containers"][0]["env"]}
        assert values["MESHGATE_WORKER_NOTICE"] == notice


@pytest.mark.parametrize("pod_of", ["gateway", "worker"])
def test_pods_satisfy_the_restricted_security_standard(pod_of: str) -> None:
    spec = job()
    pod = gateway_template(spec)["spec"] if pod_of == "gateway" else worker_pod()
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert {"hostNetwork", "hostPID", "hostIPC"}.isdisjoint(pod)
    assert all(set(volume) <= {"name", "emptyDir"} for volume in pod["volumes"])


def test_all_resources_but_cpu_are_limited() -> None:
    pod = worker_pod(cpu="4", memory="8Gi", disk_size="10Gi", gpus=2, resources={"rdma/hca": "1"})
    resources = pod["containers"][0]["resources"]
    limits = {"memory": "8Gi", "ephemeral-storage": "10Gi", "nvidia.com/gpu": "2", "rdma/hca": "1"}
    assert resources == {"limits": limits, "requests": {"cpu": "4", **limits}}


def test_node_selector_and_tolerations() -> None:
    pod = worker_pod(
        gpus=1, gpu_type="A100", node_selector={"zone": "a"}, tolerations=({"key": "gpu", "operator": "Exists"},)
    )
    assert pod["nodeSelector"] == {"zone": "a", "nvidia.com/gpu.product": "A100"}
    assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert worker_pod(gpus=1, gpu_type="accelerator=h100")["nodeSelector"] == {"accelerator": "h100"}


def test_volumes_and_shared_memory_are_mounted() -> None:
    mount = VolumeMount(mount_path="/data", source={"persistentVolumeClaim": {"claimName": "data"}}, read_only=True)
    pod = worker_pod(volumes=(mount,), shared_memory_limit="1Gi")
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}} in pod["volumes"]
    assert {"name": "volume-0", "persistentVolumeClaim": {"claimName": "data"}} in pod["volumes"]
    mounts = pod["containers"][0]["volumeMounts"]
    assert {"name": "volume-0", "mountPath": "/data", "readOnly": True} in mounts


def test_a_raw_pod_spec_is_merged_over_the_generated_one() -> None:
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


def test_a_complete_template_only_gets_labels() -> None:
    template = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "mine", "image": "x"}]}}
    spec = job(mesh(template=template))
    made = worker_template(spec, spec.meshes[0])
    assert made["spec"]["containers"][0].items() >= template["spec"]["containers"][0].items()
    assert made["metadata"]["labels"]["a"] == "b"
    assert made["metadata"]["labels"][JOB_LABEL] == "trainer"


def templated(*containers: dict[str, Any]) -> list[Any]:
    given = mesh(template={"spec": {"containers": list(containers)}}).model_copy(update={"port": 999})
    return list(worker_template(job(given), given)["spec"]["containers"])


def test_a_template_without_a_command_runs_the_worker() -> None:
    given = {"name": "mine", "image": "x", "env": [{"name": "MONARCH_PORT", "value": "7"}]}
    (made,) = templated(given)
    assert made["command"][-1] == "tcp://$(POD_IP):999@tcp://0.0.0.0:999"
    assert [each["value"] for each in made["env"] if each["name"] == "MONARCH_PORT"] == ["7"]
    assert "POD_IP" in [each["name"] for each in made["env"]]
    assert given == {"name": "mine", "image": "x", "env": [{"name": "MONARCH_PORT", "value": "7"}]}
    sidecar, worker = templated({"name": "proxy"}, {"name": "worker"})
    assert sidecar == {"name": "proxy"}
    assert worker["command"][:2] == ["python", "-u"]


@pytest.mark.parametrize("given", [{"command": ["run"]}, {"args": ["--port=1"]}])
def test_a_template_with_a_command_keeps_it(given: dict[str, Any]) -> None:
    assert templated({"name": "mine", **given}) == [{"name": "mine", **given}]
    assert templated({"name": "one"}, {"name": "two"}) == [{"name": "one"}, {"name": "two"}]


def test_the_gateway_gets_the_lease_and_idle_timeout_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHGATE_TOKEN", "a-token-for-this-test")
    (container,) = gateway_template(job(idle_timeout=60, lease=90))["spec"]["containers"]
    for variable in container["env"]:
        if "value" in variable:
            monkeypatch.setenv(variable["name"], variable["value"])
    settings = load_settings(container["args"])
    assert (settings.idle_timeout, settings.lease) == (60, 90)


STAY = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}


@pytest.mark.parametrize(("log_output", "value"), [(True, "true"), (False, "false")])
def test_the_gateway_logs_output_unless_the_job_says_otherwise(log_output: bool, value: str) -> None:
    (container,) = gateway_template(job().model_copy(update={"log_output": log_output}))["spec"]["containers"]
    assert {"name": "MESHGATE_LOG_OUTPUT", "value": value} in container["env"]


def test_metrics_of_a_gateway_are_scraped_unless_the_user_says_so() -> None:
    template = gateway_template(job())
    (container,) = template["spec"]["containers"]
    assert {"name": "MESHGATE_METRICS_PORT", "value": "8651"} in container["env"]
    assert {"name": "metrics", "containerPort": 8651, "protocol": "TCP"} in container["ports"]
    assert template["metadata"]["annotations"]["prometheus.io/port"] == "8651"
    spec = job().model_copy(update={"gateway": GatewaySpec(annotations={"prometheus.io/scrape": "false"})})
    assert gateway_template(spec)["metadata"]["annotations"]["prometheus.io/scrape"] == "false"


def test_autoscalers_do_not_move_pods_unless_the_user_says_so() -> None:
    spec = job()
    assert gateway_template(spec)["metadata"]["annotations"] == {**STAY, **SCRAPE}
    assert worker_template(spec, spec.meshes[0])["metadata"]["annotations"] == STAY
    own = {"karpenter.sh/do-not-disrupt": "false", "mine": "yes"}
    assert worker_template(spec, mesh(annotations=own))["metadata"]["annotations"] == {**STAY, **own}
    raw = mesh(template={"metadata": {"annotations": own}, "spec": {}})
    assert worker_template(spec, raw)["metadata"]["annotations"] == {**STAY, **own}


def node_affinity(template: Any) -> Any:
    return template["spec"].get("affinity", {}).get("nodeAffinity")


def test_the_gateway_avoids_nodes_that_are_taken_back_unless_the_user_says_so() -> None:
    ((rule, (term,)),) = node_affinity(gateway_template(job())).items()
    assert rule == "preferredDuringSchedulingIgnoredDuringExecution"
    wanted = term["preference"]
    assert {"key": "karpenter.sh/capacity-type", "operator": "NotIn", "values": ["spot"]} in wanted["matchExpressions"]
    never = job().model_copy(update={"gateway": GatewaySpec(spot="never")})
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [wanted]}}
    assert node_affinity(gateway_template(never)) == required
    allowed = job().model_copy(update={"gateway": GatewaySpec(spot="allow")})
    assert node_affinity(gateway_template(allowed)) is None


def test_workers_run_on_nodes_that_are_taken_back_unless_the_user_says_so() -> None:
    assert node_affinity(worker_template(job(), mesh())) is None
    assert set(node_affinity(worker_template(job(), mesh(spot="avoid")))) == {
        "preferredDuringSchedulingIgnoredDuringExecution"
    }


def test_the_gateway_has_the_priority_class_of_its_workers() -> None:
    assert "priorityClassName" not in gateway_template(job())["spec"]
    assert gateway_template(job(mesh(priority_class_name="research")))["spec"]["priorityClassName"] == "research"


def test_pods_with_gpus_have_shared_memory_of_their_memory_limit() -> None:
    def shared_memory(**worker: Any) -> list[Any]:
        return [each["emptyDir"] for each in worker_pod(**worker)["volumes"] if each["name"] == "shm"]

    assert shared_memory(gpus=1, memory="8Gi") == [{"medium": "Memory", "sizeLimit": "8Gi"}]
    assert shared_memory(resources={"amd.com/gpu": "1"}) == [{"medium": "Memory"}]
    assert shared_memory(memory="8Gi") == []
    own = VolumeMount(mount_path="/dev/shm", source={"emptyDir": {"medium": "Memory"}})
    assert shared_memory(gpus=1, volumes=(own,)) == []


def test_only_volumes_are_writable_and_they_have_the_size_of_the_disk() -> None:
    pod = worker_pod(disk_size="10Gi")
    (container,) = pod["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert {"name": "HOME", "value": "/home/meshgate"} in container["env"]
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/tmp", "/home/meshgate"}
    assert all(volume["emptyDir"] == {"sizeLimit": "10Gi"} for volume in pod["volumes"])


def test_a_gateway_has_two_minutes_to_start() -> None:
    (container,) = gateway_template(job())["spec"]["containers"]
    probe = container["livenessProbe"]
    assert probe["initialDelaySeconds"] + probe["periodSeconds"] * probe["failureThreshold"] == 120


def test_the_gateway_has_requests_and_limits() -> None:
    (container,) = gateway_template(job())["spec"]["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "250m", "memory": "512Mi"},
        "limits": {"cpu": "4", "memory": "8Gi"},
    }
    own = gateway_template(job(gateway=GatewaySpec(cpu="2", disk_size="20Gi", service_account_name="mine")))["spec"]
    resources = own["containers"][0]["resources"]
    assert resources["requests"] == {"cpu": "2", "memory": "512Mi", "ephemeral-storage": "20Gi"}
    assert resources["limits"] == {"cpu": "2", "memory": "8Gi", "ephemeral-storage": "20Gi"}
    assert own["volumes"][0]["emptyDir"] == {"sizeLimit": "20Gi"}
    assert own["serviceAccountName"] == "mine"


def test_the_users_labels_precede_the_recommended_ones() -> None:
    template = worker_template(job(), mesh(labels={"app.kubernetes.io/name": "llm", "meshgate.dev/job": "other"}))
    labels = template["metadata"]["labels"]
    assert (labels["app.kubernetes.io/name"], labels["app.kubernetes.io/instance"]) == ("llm", "trainer")
    assert labels["meshgate.dev/job"] == "trainer"


def pod_of(**worker: object) -> Object:
    spec = job(mesh(**worker))  # type: ignore[arg-type]
    return worker_template(spec, spec.meshes[0])["spec"]  # type: ignore[no-any-return]


def variable(container: Object, name: str) -> object:
    return next((each["value"] for each in container["env"] if each["name"] == name), None)


def test_nothing_is_installed_unless_it_is_requested() -> None:
    pod = pod_of()
    assert "initContainers" not in pod
    assert variable(pod["containers"][0], "PYTHONPATH") is None


def test_the_release_is_that_of_the_gateways_image() -> None:
    release = MONARCH_REQUIREMENT.removesuffix(".*")
    assert f"{release}." in (ROOT / "constraints.txt").read_text()


def test_the_init_container_is_like_the_worker_but_without_its_devices() -> None:
    pod = pod_of(install_monarch=True, memory="8Gi", gpus=2, secrets=("pip",), env_vars={"PIP_INDEX_URL": "http://x"})
    (init,), (worker,) = pod["initContainers"], pod["containers"]
    for field in ("image", "envFrom", "securityContext", "volumeMounts"):
        assert init[field] == worker[field]
    assert variable(init, "PIP_INDEX_URL") == "http://x"
    assert init["resources"] == {"requests": {"memory": "8Gi"}, "limits": {"memory": "8Gi"}}
    assert {"name": "monarch", "mountPath": "/opt/monarch"} in worker["volumeMounts"]
    assert {"name": "monarch", "emptyDir": {}} in pod["volumes"]


def test_the_users_pythonpath_comes_first_and_pip_does_not_see_what_is_not_there_yet() -> None:
    pod = pod_of(install_monarch=True, env_vars={"PYTHONPATH": "/mine"})
    assert variable(pod["containers"][0], "PYTHONPATH") == f"/mine:{PYTHONPATH}"
    assert variable(pod["initContainers"][0], "PYTHONPATH") is None


def test_a_gateway_without_an_image_of_its_own_is_installed_with_its_variables_and_without_its_token() -> None:
    variables = {"PIP_INDEX_URL": "http://x", "HOME": "/h", "MESHGATE_LOG_FORMAT": "text"}
    gateway = GatewaySpec(install_monarch=True, env_vars=variables, secrets=("pip",))
    pod = gateway_template(job(gateway=gateway))["spec"]
    (init,), (container,) = pod["initContainers"], pod["containers"]
    assert container["command"] == ["python", "-m", "meshgate_gateway"]
    assert (variable(container, "PYTHONPATH"), variable(container, "HOME")) == (PYTHONPATH, "/home/meshgate")
    names = [each["name"] for each in container["env"]]
    assert len(names) == len(set(names))
    assert "MESHGATE_TOKEN" in names
    assert (init["image"], init["securityContext"]) == (container["image"], container["securityContext"])
    assert (variable(init, "PIP_INDEX_URL"), init["envFrom"]) == ("http://x", [{"secretRef": {"name": "pip"}}])
    assert not {"MESHGATE_TOKEN", "PYTHONPATH"} & {each["name"] for each in init["env"]}
    (mount,) = (each for each in init["volumeMounts"] if each not in container["volumeMounts"])
    assert init["command"][-1] == f"{mount['mountPath']}/{PACKED_WHEEL}"
    assert {"name": mount["name"], "secret": {"secretName": "trainer-wheel"}} in pod["volumes"]


def test_a_gateway_with_an_image_of_its_own_runs_that() -> None:
    pod = gateway_template(job(gateway=GatewaySpec(env_vars={"A": "b"})))["spec"]
    assert "initContainers" not in pod
    assert "command" not in pod["containers"][0]
    assert "A" not in {each["name"] for each in pod["containers"][0]["env"]}


def install(tmp_path: Path, pip: str, *packed: str) -> subprocess.CompletedProcess[str]:
    """Runs the init container's program with a pip that does what ``pip`` says."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(pip)
    target = tmp_path / "target"
    target.mkdir()
    return subprocess.run(
        [sys.executable, "-c", pods._INSTALL, str(target), MONARCH_REQUIREMENT, *packed],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )


@pytest.mark.parametrize("layout", ["lib/python3.11/site-packages", "local/lib/python3.11/dist-packages"])
def test_the_installed_packages_are_found_in_every_layout(tmp_path: Path, layout: str) -> None:
    made = f"import os, sys; os.makedirs(sys.argv[sys.argv.index('--prefix') + 1] + '/{layout}/numpy')"
    assert install(tmp_path, made).returncode == 0
    assert (tmp_path / "target" / "packages-0" / "numpy").is_dir()


def test_the_wheel_of_a_gateway_is_unpacked_under_the_name_that_pip_reads_its_version_from(tmp_path: Path) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as wheel:
        wheel.writestr("meshgate-1.2.dist-info/METADATA", "")
    (tmp_path / PACKED_WHEEL).write_bytes(bz2.compress(content.getvalue()))
    pip = "import sys; assert sys.argv[-2] == 'torchmonarch==0.7.*'; print(sys.argv[-1])"
    path = install(tmp_path, pip, str(tmp_path / PACKED_WHEEL)).stdout.strip()
    assert path.endswith("/meshgate-1.2-py3-none-any.whl[gateway]")
    assert Path(path.removesuffix("[gateway]")).read_bytes() == content.getvalue()


def test_a_failed_installation_says_what_to_do(tmp_path: Path) -> None:
    failed = install(tmp_path, "raise SystemExit(1)")
    assert failed.returncode == 1
    assert "cannot install torchmonarch==0.7.* in this image" in failed.stderr
    assert "PIP_INDEX_URL" in failed.stderr


REPLACEABLE = job(gateway=GatewaySpec(replicas=2, cpu="2", annotations={"team": "a"}), idle_timeout=60)


def loaded(component: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Settings, Object, str]:
    """The settings of a component, its container, and the key of the Secret that is its token."""
    (container,) = gateway_template(REPLACEABLE, component)["spec"]["containers"]
    monkeypatch.setenv("MESHGATE_TOKEN", "a-token-for-this-test")
    for variable in container["env"]:
        if "value" in variable:
            monkeypatch.setenv(variable["name"], variable["value"])
    (token,) = (each["valueFrom"]["secretKeyRef"] for each in container["env"] if each["name"] == "MESHGATE_TOKEN")
    assert token["name"] == "trainer-token"
    return load_settings(container["args"]), container, token["key"]


def test_a_gateway_that_forwards_has_the_token_and_neither_sessions_nor_metrics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings, container, key = loaded("forwarder", monkeypatch)
    assert (settings.forward_to, settings.kubernetes_job, key) == ("job", "trainer", "token")
    assert [port["name"] for port in container["ports"]] == ["gateway"]
    assert container["resources"]["requests"] == {"cpu": "100m", "memory": "128Mi"}


def test_the_pod_with_the_engines_has_the_key_and_what_the_job_says_of_its_gateway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings, container, key = loaded("engines", monkeypatch)
    assert (settings.behind_gateways, settings.idle_timeout, settings.metrics_port, key) == (True, 60, 8651, "key")
    assert container["resources"]["requests"]["cpu"] == "2"
    template = gateway_template(REPLACEABLE)
    assert template == gateway_template(REPLACEABLE, "engines")
    assert template["metadata"]["annotations"] == {**STAY, **SCRAPE, "team": "a"}


def test_gateways_that_forward_are_apart_and_may_be_evicted() -> None:
    template = gateway_template(REPLACEABLE, "forwarder")
    assert template["metadata"]["annotations"] == {**pods.EVICTABLE, "team": "a"}
    affinity = template["spec"]["affinity"]
    assert set(affinity) == {"podAntiAffinity"}
    ((term,),) = affinity["podAntiAffinity"].values()
    own = {JOB_LABEL: "trainer", "app.kubernetes.io/component": "forwarder"}
    assert term["podAffinityTerm"] == {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": own}}


@pytest.mark.skipif(sys.platform != "linux", reason="pods run Linux")
def test_a_worker_with_torchmonarch_alone_does_not_wait_for_sync_agents_once_it_is_to_end(tmp_path: Path) -> None:
    (tmp_path / "monarch" / "_src" / "job").mkdir(parents=True)
    for module in ("__init__", "_src/__init__", "_src/job/__init__", "_src/job/service_identity"):
        (tmp_path / "monarch" / f"{module}.py").touch()
    (tmp_path / "monarch" / "actor.py").write_text(
        "import time\ndef run_worker_loop_forever(**_):\n    time.sleep(600)\n"
    )
    proc = tmp_path / "proc"  # of a pod with a sync agent and a process that a session has spawned
    for pid, name in (("self", "python"), ("4711", SYNC_AGENT), ("4712", "python")):
        (proc / pid).mkdir(parents=True)
        (proc / pid / "cgroup").write_text("0::/pod\n")
        (proc / pid / "comm").write_text(f"{name}\n")
        (proc / pid / "stat").write_text(f"{pid} ({name}) S 1")
    script = WORKER_BOOTSTRAP.replace('"/proc', f'"{proc}')
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    address = f"tcp://127.0.0.1:{free_port(VERSIONS_PORT_OFFSET)}"
    command = [sys.executable, "-S", "-c", path + script, address]  # without site-packages: without meshgate_worker
    environment = {**os.environ, "MESHGATE_WORKER_NOTICE": "600"}
    with subprocess.Popen(command, env=environment, start_new_session=True) as worker:
        try:
            wait_for(lambda: handles(worker.pid, signal.SIGALRM), "the handlers")
            worker.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                worker.wait(1.0)  # it looks every 0.2 s
            shutil.rmtree(proc / "4712")
            assert worker.wait(60) == 256 - signal.SIGTERM
        finally:
            os.killpg(worker.pid, signal.SIGKILL)


def handles(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask, 16) & 1 << (number - 1))
