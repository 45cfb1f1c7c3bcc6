"""What KubernetesJob refuses, keeps and tells without any cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshgate import Compute, ImageSpec, KubernetesJob, job_loads
from meshgate.errors import JobError, JobStartFailed
from meshgate_kubernetes.jobs import RunningJob


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"compute": Compute(), "selector": {"a": "b"}}, "either made or found"),
        ({"use_websocket": False}, "by a websocket only"),
        ({"name": "Trainer"}, "job name 'Trainer' is invalid"),
        ({"lease": 0}, r"KubernetesJob\(lease"),
        ({"lease": float("inf")}, r"KubernetesJob\(lease"),
        ({"selector": ""}, "every pod of the namespace"),
        ({"selector": {"a": "b c"}}, "is not a label value"),
        ({"selector": "a in (b"}, "is not a label selector"),
        ({"selector": 5}, "selector=5: expected labels"),
        ({"compute": {"gpus": 1}}, r"compute=\{'gpus': 1\}: expected a Compute"),
        ({"compute": Compute, "name": "a"}, r"expected a Compute\(…\)"),
        ({"compute": Compute(namespace="a"), "namespace": "b"}, "give one of them"),
        ({"namespace": "Team"}, r"KubernetesJob\(namespace='Team'"),
        ({"name": 5}, "job name 5 is invalid"),
        ({"compute": Compute(), "monarch_port": 0}, r"KubernetesJob\(monarch_port=0"),
        ({"timeout": 0}, r"KubernetesJob\(timeout=0"),
        ({"timeout": float("nan")}, r"KubernetesJob\(timeout=nan"),
        ({"gateway_url": "example.com"}, r"gateway_url='example.com'\): expected ws://"),
        ({"gateway_url": "wss://example.com:port"}, "expected ws://"),
        ({"kubeconfig": {"a": 1}}, "pass the path of a kubeconfig"),
        ({"sync_dirs": "src"}, "sync_dirs='src'.*expected a list"),
        ({"sync_dirs": ["/no/such"]}, "'/no/such' is no directory here"),
    ],
)
def test_arguments_that_cannot_be_right_are_refused_at_once(given: dict[str, Any], told: str) -> None:
    with pytest.raises((ValueError, TypeError), match=told):
        KubernetesJob(**given)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"name": "Workers"}, "lowercase alphanumeric"),
        ({"num_replicas": 0}, "num_replicas must be at least 1"),
        ({"image_spec": ImageSpec("x"), "pod_spec": {"containers": [{}]}}, "'image_spec' and 'pod_spec' are mutually"),
        ({"image_spec": ImageSpec("x"), "label_selector": "a=b"}, "'label_selector' cannot be customized"),
        ({"image_spec": ImageSpec("x"), "pod_rank_label": "rank"}, "'pod_rank_label' cannot be customized"),
        ({"labels": {"a": "b"}}, "'labels' can only be set when provisioning"),
        ({"annotations": {"a": "b"}}, "'annotations' can only be set when provisioning"),
        ({"pod_spec": {}}, "has no containers"),
        ({"compute": Compute(), "image_spec": ImageSpec("x")}, "'compute' describes the pods"),
        ({"image_spec": ImageSpec("x", resources={"memory": "1GB"})}, "not a Kubernetes quantity"),
        ({"image_spec": ImageSpec("x"), "port": 0}, "port"),
        ({"name": "gateway"}, "the job's own gateway is called so"),
        ({"name": 5}, "a mesh's name is text, not 5"),
        ({"num_replicas": -1, "compute": Compute()}, "num_replicas must be at least 1, not -1"),
        ({"compute": "a"}, "compute='a': expected a Compute"),
        ({"compute": Compute(), "labels": {"a b": "c"}}, "'a b' is not a label key"),
        ({"image_spec": ImageSpec("x"), "labels": {"a b": "c"}}, "'a b' is not a label key"),
        ({"image_spec": ImageSpec("x"), "labels": {"meshgate.dev/mesh": "c"}}, "set by meshgate itself"),
        ({"image_spec": "pytorch"}, "'image_spec' is an ImageSpec"),
        ({"pod_spec": {"containers": "abc"}}, "has no containers"),
        ({"pod_rank_label": "a b"}, "'pod_rank_label' is the key of a label"),
        ({"label_selector": "a in (b"}, "is not a label selector"),
    ],
)
def test_add_mesh_has_monarchs_rules(given: dict[str, Any], told: str) -> None:
    job = KubernetesJob()
    arguments = {"name": "trainers", "num_replicas": 2, **given}
    with pytest.raises((ValueError, TypeError), match=told):
        job.add_mesh(**arguments)
    assert job._asked.meshes == ()


@pytest.mark.parametrize(
    ("given", "told"),
    [((5,), r"ImageSpec\(image=5\)"), (("x", 5), r"ImageSpec\(resources=5\)"), (("x", {"gpu": 1.5}), "resources.gpu")],
)
def test_an_image_spec_that_cannot_be_is_refused_by_name(given: tuple[Any, ...], told: str) -> None:
    with pytest.raises((ValueError, TypeError), match=told):
        ImageSpec(*given)


def test_a_compute_with_a_selector_takes_as_many_pods_as_it_says() -> None:
    assert KubernetesJob(compute=Compute(selector={"a": "b"}, replicas=4))._asked.meshes[0].replicas == 4
    assert KubernetesJob(compute=Compute(selector={"a": "b"}))._asked.meshes[0].replicas == 0


def test_a_mesh_of_the_same_name_is_replaced() -> None:
    job = KubernetesJob(compute=Compute(replicas=2))
    job.add_mesh("workers", 3, image_spec=ImageSpec("x", resources={"nvidia.com/gpu": 4}, shared_memory_size="1Gi"))
    (mesh,) = job._asked.meshes
    assert mesh.replicas == 3
    assert mesh.worker is not None
    assert mesh.worker.resources == {"nvidia.com/gpu": "4"}
    assert mesh.worker.shared_memory_limit == "1Gi"


def test_the_pods_of_a_monarch_mesh_are_looked_for_by_default() -> None:
    job = KubernetesJob()
    job.add_mesh("trainers", 2)
    assert job._asked.meshes[0].spec("any").selector == (
        "app.kubernetes.io/name=monarch-worker,monarch.pytorch.org/mesh-name=trainers"
    )


def test_without_a_cluster_apply_says_what_to_set() -> None:
    with pytest.raises(JobError, match="Set KUBECONFIG, or MESHGATE_URL"):
        KubernetesJob(compute=Compute()).apply()


def test_a_kubeconfig_that_is_not_there_is_named() -> None:
    with pytest.raises(JobError, match="/no/such/file"):
        KubernetesJob(compute=Compute(), kubeconfig="/no/such/file").apply()


GOOD = """
apiVersion: v1
kind: Config
current-context: dev
contexts: [{name: dev, context: {cluster: dev, user: me}}]
clusters: [{name: dev, cluster: {server: "https://127.0.0.1:1"}}]
users: [{name: me, user: {token: secret}}]
"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (GOOD.replace("current-context: dev", "current-context: prod"), "name prod in .*kubeconfig/contexts"),
        (GOOD.replace("current-context: dev", ""), "Expected key current-context"),
        (GOOD.replace("user: {token: secret}", "user: {client-certificate: gone.crt}"), "gone.crt"),
        ("", "file is empty"),
        ("just words", "cannot be used"),
        ("[1, 2]", "cannot be used"),
        ("{unclosed: [", "cannot be used"),
        ("\x00", "cannot be used"),
    ],
)
def test_a_kubeconfig_that_is_none_is_named_with_what_is_wrong(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(JobError, match=told) as caught:
        KubernetesJob(compute=Compute(), kubeconfig=path).apply()
    assert str(path) in str(caught.value)


def test_a_cluster_that_does_not_answer_is_named(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(GOOD)
    with pytest.raises(JobStartFailed, match=r"https://127\.0\.0\.1:1 .* does not answer"):
        KubernetesJob(compute=Compute(), kubeconfig=path).apply()


def test_a_gateway_by_url_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHGATE_URL", "wss://gateway.example")
    with pytest.raises(JobError, match="set MESHGATE_TOKEN"):
        KubernetesJob().apply()


def test_a_job_that_was_not_applied_is_saved_and_loaded() -> None:
    job = KubernetesJob(compute=Compute(gpus=1, replicas=2, env_vars={"A": "b"}), name="saved", namespace="team")
    again = job_loads(job.dumps())
    assert isinstance(again, KubernetesJob)
    assert again._asked == job._asked
    assert not again.active


def test_the_lease_goes_with_the_job() -> None:
    assert KubernetesJob(compute=Compute(), lease=600)._asked.spec("any").lease == 600
    assert KubernetesJob(compute=Compute())._asked.spec("any").lease == 14_400


def test_two_jobs_are_the_same_when_they_ask_for_the_same_pods() -> None:
    asked = KubernetesJob(compute=Compute(), name="a", timeout=5)._asked
    assert asked.same_as(KubernetesJob(compute=Compute())._asked)
    assert not asked.same_as(KubernetesJob(compute=Compute(), name="b")._asked)
    assert not asked.same_as(KubernetesJob(compute=Compute(replicas=2), name="a")._asked)
    assert not asked.same_as(KubernetesJob(compute=Compute(), name="a", namespace="other")._asked)


class Interrupted:
    """A session that a Ctrl-C interrupts while it is closed."""

    closed = False

    def close(self) -> None:
        raise KeyboardInterrupt


class ItsPlace:
    def __init__(self) -> None:
        self.ended: list[str] = []

    def end(self, job: RunningJob) -> None:
        self.ended.append(job.name)


def test_a_second_ctrl_c_while_the_session_is_closed_does_not_leave_the_pods() -> None:
    job, place = KubernetesJob(name="trainer"), ItsPlace()
    job._where = place  # type: ignore[assignment]
    job._client = Interrupted()  # type: ignore[assignment]
    job._found = RunningJob(name="trainer", namespace="default", uid="1", token="", meshes={"workers": 1})
    with pytest.raises(KeyboardInterrupt):
        job._kill()
    assert place.ended == ["trainer"]
