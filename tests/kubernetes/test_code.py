"""Code sync to pods: recreated pods, restarted containers, the nodes of pods, and the example."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from meshgate import Compute, Image, KubernetesJob, StepFailedError, SupervisionError
from tests.kubernetes.actors import Trainer
from tests.kubernetes.cluster import Kubectl, bare_worker_pods
from tests.projects import project_in

ROOT = Path(__file__).parents[2]
MODEL = """
from meshgate import Actor, endpoint
from step_of_pods import STEP

class Model(Actor):
    @endpoint
    def step(self):
        return STEP

    @endpoint
    def mark(self):
        import os
        return os.environ.get("MARK", "none")
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    files = {"step_of_pods.py": "STEP = 1\n", "model_of_pods.py": MODEL}
    with project_in(tmp_path, monkeypatch, files) as directory:
        yield directory


def model() -> Any:
    import importlib

    return importlib.import_module("model_of_pods").Model


def steps(mesh: Any) -> list[int]:
    return list(mesh.step.call().get(timeout=90).values())


def call_for_ever(mesh: Any) -> NoReturn:
    while True:
        steps(mesh)


def test_a_recreated_pod_gets_the_newest_version_in_the_same_session(
    namespace: str, kubectl: Kubectl, project: Path
) -> None:
    image = Image("recreated").set_env_vars({"MARK": "set by a step"})
    with KubernetesJob(compute=Compute(replicas=3, image=image), name="recreated", namespace=namespace) as job:
        hosts = job.state().workers
        job.sync(quiet=True)
        first = hosts.spawn_procs().spawn("first", model())
        assert steps(first) == [1, 1, 1]
        kubectl("delete", "pod", "recreated-workers-1")
        with pytest.raises(SupervisionError, match="recreated-workers-1"):  # until the gateway knows
            call_for_ever(first)
        (project / "step_of_pods.py").write_text("STEP = 22\n")
        job.state().workers.initialized.get(timeout=90)
        assert job.sync(quiet=True).ready == 3
        again = hosts.spawn_procs().spawn("again", model())
        assert steps(again) == [22, 22, 22]
        assert steps(first.slice(hosts=0)) == [1]
        marked = job.state().workers.spawn_procs().spawn("marked", model())
        assert list(marked.mark.call().get(timeout=90).values()) == ["set by a step"] * 3


def test_a_restarted_container_is_a_new_host_and_serves_a_new_session(
    namespace: str, kubectl: Kubectl, project: Path
) -> None:
    with KubernetesJob(compute=Compute(replicas=2), name="crash", namespace=namespace) as job:
        hosts = job.state().workers
        job.sync(quiet=True)
        assert steps(hosts.spawn_procs().spawn("first", model())) == [1, 1]
        kubectl.end_container("crash-workers-1")
        state = "{.status.containerStatuses[0].restartCount} {.status.containerStatuses[0].ready}"
        kubectl.watch_pod("crash-workers-1", state, lambda state: state == "1 true")
        again = r"crash-workers-1: the host has restarted at its old address"
        with pytest.raises(SupervisionError, match=again):  # until then, it is to return
            hosts.initialized.get(timeout=90)
        with pytest.raises(StepFailedError, match=again):
            steps(job.state().workers.spawn_procs().spawn("again", model()))
        with pytest.raises(StepFailedError, match=again):
            steps(hosts.spawn_procs().spawn("again", model()))
        assert steps(hosts.slice(hosts=slice(0, 1)).spawn_procs().spawn("left", model())) == [1]
        job._client.close()
        hosts = job.state().workers
        job.sync(quiet=True)
        assert steps(hosts.spawn_procs().spawn("second", model())) == [1, 1]


def test_pods_with_only_torchmonarch_run_saved_code(
    namespace: str, kubectl: Kubectl, images: tuple[str, str], project: Path
) -> None:
    with bare_worker_pods(kubectl, images[1], "bare-code", 2):
        kubectl("rollout", "status", "statefulset/bare-code", "--timeout=180s", timeout=190)
        with KubernetesJob(selector={"app": "bare-code"}, namespace=namespace) as job:
            hosts = job.state().workers
            assert job.sync(quiet=True).ready == 2
            assert steps(hosts.spawn_procs().spawn("first", model())) == [1, 1]
            (project / "step_of_pods.py").write_text("STEP = 333\n")
            assert job.sync(quiet=True).ready == 2
            assert steps(hosts.spawn_procs().spawn("second", model())) == [333, 333]


def test_the_gateway_knows_the_node_of_each_pod(namespace: str, kubectl: Kubectl) -> None:
    with KubernetesJob(compute=Compute(replicas=2), name="placed", namespace=namespace) as job:
        hosts = job.state().workers
        hosts.spawn_procs().spawn("trainers", Trainer).pod.call().get(timeout=60)
        (node,) = {*kubectl("get", "pods", "-o", "jsonpath={.items[*].spec.nodeName}").split()}
        known = hosts._owned.remote.hosts
        assert [(host.name, host.node) for host in known] == [("placed-workers-0", node), ("placed-workers-1", node)]


def test_the_example_of_live_code_runs_in_the_cluster(namespace: str, images: tuple[str, str], tmp_path: Path) -> None:
    example = [str(ROOT / "examples" / "live_code.py"), "--kubernetes", images[1], "--namespace", namespace]
    done = subprocess.run(
        [sys.executable, *example], cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    output = dict(line.split(":", 1) for line in done.stdout.splitlines() if ":" in line)
    assert output["four processes run it"].split() == ["[0.1,", "0.1,", "0.1,", "0.1]"]
    assert output["new processes run the new line"].strip() == "[0.02, 0.02]"
    assert output["old processes still run their version"].strip() == "[0.1, 0.1, 0.1, 0.1]"
    assert output["after reload(), they have reloaded"].strip() == "rates, model"
    assert output["a new actor in the same processes"].strip() == "[0.003, 0.003, 0.003, 0.003]"
    assert re.search(r"synced .* → 2/2 hosts in", done.stderr)  # the files themselves were synced by state()
