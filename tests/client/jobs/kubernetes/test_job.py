"""KubernetesJob without a cluster: arguments, requests and saved jobs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import kubernetes
import pytest

from meshgate import (
    Compute,
    ImageSpec,
    JobNotRunning,
    JobUnsupported,
    KubeConfig,
    KubernetesJob,
    job_load,
    job_loads,
)
from meshgate.errors import JobError, JobStartFailed
from meshgate.session import gateway_client
from meshgate_kubernetes.jobs.lifecycle import RunningJob


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compute": Compute(), "selector": {"a": "b"}}, "either created or found"),
        ({"use_websocket": False}, "supports websockets only"),
        ({"attach_to": "tcp://127.0.0.1:26600"}, "through the gateway only.*leave attach_to out"),
        ({"name": "Trainer"}, "invalid job name 'Trainer'"),
        ({"lease": 0}, r"KubernetesJob\(lease"),
        ({"lease": float("inf")}, r"KubernetesJob\(lease"),
        ({"selector": ""}, "every pod of the namespace"),
        ({"selector": {"a": "b c"}}, "invalid value 'b c' of label 'a'"),
        ({"selector": "a in (b"}, "invalid label selector"),
        ({"selector": 5}, "selector=5: expected labels"),
        ({"compute": {"gpus": 1}}, r"compute=\{'gpus': 1\}: expected a Compute"),
        ({"compute": Compute, "name": "a"}, r"expected a Compute\(…\)"),
        ({"compute": Compute(namespace="a"), "namespace": "b"}, "pass only one"),
        ({"namespace": "Team"}, r"KubernetesJob\(namespace='Team'"),
        ({"name": 5}, "invalid job name 5"),
        ({"compute": Compute(), "monarch_port": 0}, r"KubernetesJob\(monarch_port=0"),
        ({"timeout": 0}, r"KubernetesJob\(timeout=0"),
        ({"timeout": float("nan")}, r"KubernetesJob\(timeout=nan"),
        ({"gateway_url": "example.com"}, r"gateway_url='example.com'\): expected ws://"),
        ({"gateway_url": "wss://example.com:port"}, "expected ws://"),
        ({"kubeconfig": {"a": 1}}, "pass the path of a kubeconfig"),
        ({"sync_dirs": "src"}, "sync_dirs='src'.*expected a list"),
        ({"sync_dirs": ["/no/such"]}, "'/no/such' is not a directory on this machine"),
    ],
)
def test_invalid_arguments_are_rejected_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        KubernetesJob(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
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
        ({"name": "gateway"}, "'gateway' is reserved for the job's gateway"),
        ({"name": 5}, "mesh name must be a string, not 5"),
        ({"num_replicas": -1, "compute": Compute()}, "num_replicas must be at least 1, not -1"),
        ({"compute": "a"}, "compute='a': expected a Compute"),
        ({"compute": Compute(), "labels": {"a b": "c"}}, "invalid label key 'a b'"),
        ({"image_spec": ImageSpec("x"), "labels": {"a b": "c"}}, "invalid label key 'a b'"),
        ({"image_spec": ImageSpec("x"), "labels": {"meshgate.dev/mesh": "c"}}, "is reserved for meshgate"),
        ({"image_spec": "pytorch"}, "'image_spec' must be an ImageSpec"),
        ({"pod_spec": {"containers": "abc"}}, "has no containers"),
        ({"pod_rank_label": "a b"}, "'pod_rank_label' must be a label key"),
        ({"label_selector": "a in (b"}, "invalid label selector"),
    ],
)
def test_add_mesh_has_monarchs_rules(arguments: dict[str, Any], message: str) -> None:
    job = KubernetesJob()
    with pytest.raises((ValueError, TypeError), match=message):
        job.add_mesh(**{"name": "trainers", "num_replicas": 2, **arguments})
    assert job._request.meshes == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((5,), r"ImageSpec\(image=5\)"), (("x", 5), r"ImageSpec\(resources=5\)"), (("x", {"gpu": 1.5}), "resources.gpu")],
)
def test_an_invalid_image_spec_is_rejected_by_name(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        ImageSpec(*arguments)


def test_a_compute_with_a_selector_uses_all_pods_or_as_many_as_it_says() -> None:
    for count in (1, 4):
        found = KubernetesJob(compute=Compute(selector={"a": "b"}, replicas=count))
        assert found._request.meshes[0].replicas == count
    assert KubernetesJob(compute=Compute(selector={"a": "b"}))._request.meshes[0].replicas == 0


def test_a_mesh_of_the_same_name_is_replaced() -> None:
    job = KubernetesJob(compute=Compute(replicas=2))
    job.add_mesh("workers", 3, image_spec=ImageSpec("x", resources={"nvidia.com/gpu": 4}, shared_memory_size="1Gi"))
    (mesh,) = job._request.meshes
    assert mesh.replicas == 3
    assert mesh.worker is not None
    assert mesh.worker.resources == {"nvidia.com/gpu": "4"}
    assert mesh.worker.shared_memory_limit == "1Gi"


def test_a_mesh_without_a_specification_uses_the_pods_of_a_monarch_mesh() -> None:
    job = KubernetesJob()
    job.add_mesh("trainers", 2)
    assert job._request.meshes[0].spec("any").selector == (
        "app.kubernetes.io/name=monarch-worker,monarch.pytorch.org/mesh-name=trainers"
    )


def test_without_a_cluster_apply_names_the_variables_to_set() -> None:
    with pytest.raises(JobError, match="Set KUBECONFIG, or set MESHGATE_URL"):
        KubernetesJob(compute=Compute()).apply()


def test_a_missing_kubeconfig_is_named() -> None:
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
    ("text", "message"),
    [
        (GOOD.replace("current-context: dev", "current-context: prod"), "name prod in .*kubeconfig/contexts"),
        (GOOD.replace("current-context: dev", ""), "Expected key current-context"),
        (GOOD.replace("user: {token: secret}", "user: {client-certificate: gone.crt}"), "gone.crt"),
        ("", "file is empty"),
        ("just words", "cannot use the kubeconfig"),
        ("[1, 2]", "cannot use the kubeconfig"),
        ("{unclosed: [", "cannot use the kubeconfig"),
        ("\x00", "cannot use the kubeconfig"),
    ],
)
def test_an_invalid_kubeconfig_is_named_with_the_problem(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(JobError, match=message) as caught:
        KubernetesJob(compute=Compute(), kubeconfig=path).apply()
    assert str(path) in str(caught.value)


def test_a_cluster_that_does_not_answer_is_named(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(GOOD)
    with pytest.raises(JobStartFailed, match=r"https://127\.0\.0\.1:1 .* does not respond"):
        KubernetesJob(compute=Compute(), kubeconfig=path).apply()


def test_a_gateway_url_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHGATE_URL", "wss://gateway.example")
    with pytest.raises(JobError, match="set MESHGATE_TOKEN"):
        KubernetesJob().apply()


def test_an_exported_kubeconfig_is_used_to_reach_a_url(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(GOOD)
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.delenv("MESHGATE_TOKEN", raising=False)
    job = KubernetesJob(compute=Compute(), gateway_url="wss://gateway.example")
    with pytest.raises(JobStartFailed, match=r"https://127\.0\.0\.1:1 .* does not respond"):
        job.apply()


def test_a_job_that_was_not_applied_can_be_saved_and_loaded() -> None:
    job = KubernetesJob(compute=Compute(gpus=1, replicas=2, env_vars={"A": "b"}), name="saved", namespace="team")
    again = job_loads(job.dumps())
    assert isinstance(again, KubernetesJob)
    assert again._request == job._request
    assert not again.active


def test_the_lease_is_part_of_the_job_spec() -> None:
    assert KubernetesJob(compute=Compute(), lease=600)._request.spec("any").lease == 600
    assert KubernetesJob(compute=Compute())._request.spec("any").lease == 14_400


def test_two_jobs_are_the_same_if_they_request_the_same_pods() -> None:
    request = KubernetesJob(compute=Compute(), name="a", timeout=5)._request
    assert request.same_as(KubernetesJob(compute=Compute())._request)
    assert not request.same_as(KubernetesJob(compute=Compute(), name="b")._request)
    assert not request.same_as(KubernetesJob(compute=Compute(replicas=2), name="a")._request)
    assert not request.same_as(KubernetesJob(compute=Compute(), name="a", namespace="other")._request)


def use_context(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, current: str, *others: str) -> None:
    """A kubeconfig with these contexts, the first of which is the current one."""
    names = [current, *others]
    config = {
        "current-context": current,
        "contexts": [{"name": name, "context": {"cluster": name}} for name in names],
        "clusters": [{"name": name, "cluster": {"server": f"https://{name}"}} for name in names],
    }
    (tmp_path / "config").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))


def running_job() -> KubernetesJob:
    """As ``apply`` leaves a job in the cluster of the current context."""
    job = KubernetesJob(name="trainer")
    job._provider()
    job._job = RunningJob(name="trainer", namespace="default", uid="1", token="", meshes={"workers": 1})
    job._status = "running"
    return job


def host_of(job: Any) -> str:
    return str(job._provider()._api.host)


def test_a_saved_job_stays_in_its_cluster_when_the_current_context_is_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_context(monkeypatch, tmp_path, "east", "west")
    job = running_job()
    saved, reaper = job.dumps(), job._spec_for_reaper()[1]
    use_context(monkeypatch, tmp_path, "west", "east")
    assert host_of(KubernetesJob(name="trainer")) == "https://west"
    assert [host_of(each) for each in (job_loads(saved), KubernetesJob._restore(reaper, None))] == ["https://east"] * 2
    assert job._request.same_as(KubernetesJob(name="trainer")._request)
    without = {key: value for key, value in reaper.items() if key not in ("context", "server")}
    assert host_of(KubernetesJob._restore(without, None)) == "https://west"  # saved by an earlier version


def test_a_saved_job_whose_cluster_is_not_in_the_kubeconfig_is_not_looked_for_in_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_context(monkeypatch, tmp_path, "east")
    saved = running_job().dumps()
    use_context(monkeypatch, tmp_path, "west")
    message = (
        "cannot reach the cluster of this job: context 'east' .* at https://east, and is gone; .* is 'west', .* "
        r"Restore the context, or .* pass another cached_path to state\(\), or remove the job file"
    )
    for use in (lambda found: found.kill(), lambda found: found._is_running()):
        with pytest.raises(JobError, match=message):
            use(job_loads(saved))


class InterruptedSession:
    """A session that a Ctrl-C interrupts while it closes."""

    closed = False

    def close(self) -> None:
        raise KeyboardInterrupt


class FakeProvider:
    def __init__(self) -> None:
        self.ended: list[str] = []

    def end(self, job: RunningJob) -> None:
        self.ended.append(job.name)


def test_a_second_ctrl_c_while_the_session_closes_still_ends_the_job() -> None:
    job, provider = KubernetesJob(name="trainer"), FakeProvider()
    job._cached_provider = provider  # type: ignore[assignment]
    job._client = InterruptedSession()  # type: ignore[assignment]
    job._job = RunningJob(name="trainer", namespace="default", uid="1", token="", meshes={"workers": 1})
    with pytest.raises(KeyboardInterrupt):
        job._kill()
    assert provider.ended == ["trainer"]


@pytest.mark.parametrize("uid", ["1", ""])
def test_a_job_behind_its_own_gateway_does_not_end_when_killed(uid: str) -> None:
    job = KubernetesJob(name="trainer")
    job._job = RunningJob(name="trainer", namespace="default", uid=uid, token="", meshes={"workers": 1})
    assert job._ends_when_killed == bool(uid)


def test_sessions_of_a_job_with_a_name_are_found_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    class Provider:
        def find_job(self, name: str, namespace: str) -> RunningJob:
            if name != "trainer":
                raise JobNotRunning(f"there is no job {name!r}")
            return RunningJob(name=name, namespace=namespace, uid="1", token="", meshes={"workers": 1})

        def refreshed(self, job: RunningJob) -> RunningJob:
            return job

        def dialer(self, job: RunningJob) -> str:
            return f"the way to {job.name}"

    asked: list[object] = []

    def request_json(dialer: object, path: str) -> dict[str, list[dict[str, str]]]:
        asked.append((dialer, path))
        return {"sessions": [{"id": "ab" * 16, "name": "train"}]}

    monkeypatch.setattr("meshgate.session.gateway_client.request_json", request_json)
    job, missing = KubernetesJob(name="trainer"), KubernetesJob(name="missing")
    job._cached_provider = missing._cached_provider = Provider()  # type: ignore[assignment]
    assert [info.name for info in job.sessions(None)] == ["train"]
    assert asked == [("the way to trainer", "/v1/sessions")]
    assert missing.sessions(None) == []
    with pytest.raises(JobNotRunning, match="no job 'missing'"):
        missing.attach(cached_path=None)
    assert not missing.active


def test_a_kubeconfig_of_monarchs_kind_is_a_path_or_none() -> None:
    given = KubeConfig.from_path("~/other")
    assert given.out_of_cluster
    assert not KubeConfig().out_of_cluster
    assert KubernetesJob(kubeconfig=given)._request.kubeconfig == os.path.expanduser("~/other")
    assert KubernetesJob(kubeconfig=KubeConfig(), attach_to=None)._request.kubeconfig is None
    with pytest.raises(JobUnsupported, match=r"pass from_path\(\)"):
        KubeConfig.from_config(object())


def _kubeconfig(user: dict[str, Any] | None) -> str:
    """With ``user`` as its current context, or without contexts."""
    named = [("clusters", {"cluster": {"server": "https://10.0.0.1"}}), ("contexts", {"context": _CONTEXT})]
    entries = {kind: [{"name": "it", **entry}] for kind, entry in [*named, ("users", {"user": user})] if user}
    return json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "it", **entries})


_CONTEXT = {"cluster": "it", "user": "it"}
_PLUGIN = {"command": sys.executable, "args": ["-c", "raise SystemExit('log in first')"]}
_FAILING = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "Never", **_PLUGIN}}


def test_a_kubeconfig_becomes_the_default_of_the_kubernetes_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes.client.Configuration, "_default", None)
    file = tmp_path / "config"
    file.write_text(_kubeconfig({"token": "secret"}))
    KubeConfig.from_path(str(file)).load()
    default = kubernetes.client.Configuration.get_default_copy()
    assert (default.host, default.api_key) == ("https://10.0.0.1", {"BearerToken": "Bearer secret"})


@pytest.mark.parametrize(
    ("user", "reason"),
    [(_FAILING, r"process returned 1\. log in first"), (None, "cannot use the kubeconfig .*: Invalid kube-config")],
    ids=["a failing credential plugin", "no such context"],
)
def test_a_kubeconfig_that_cannot_be_loaded_is_named_with_the_reason(
    user: dict[str, Any] | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes.client.Configuration, "_default", None)
    file = tmp_path / "config"
    file.write_text(_kubeconfig(user))
    with pytest.raises(RuntimeError, match=f"Failed to load kubeconfig: .*{reason}"):
        KubeConfig.from_path(str(file)).load()
    assert kubernetes.client.Configuration._default is None


class ScalingProvider:
    """A provider of the job ``trainer``. ``asked``: what it was asked to scale."""

    name_is_optional = False

    def __init__(self) -> None:
        self.job = RunningJob(name="trainer", namespace="default", uid="1", token="", meshes={"workers": 1})
        self.asked: list[tuple[str, int, float]] = []

    def find_job(self, name: str, namespace: str) -> RunningJob:
        return self.job

    def refreshed(self, job: RunningJob) -> RunningJob:
        return self.job

    def scale(self, job: RunningJob, mesh: str, hosts: int, timeout: float) -> RunningJob:
        self.asked.append((mesh, hosts, timeout))
        self.job = job.model_copy(update={"meshes": {**job.meshes, mesh: hosts}})
        return self.job


def scalable(provider: ScalingProvider, **arguments: Any) -> KubernetesJob:
    job = KubernetesJob(name="trainer", **arguments)
    job._cached_provider = provider  # type: ignore[assignment]
    return job


def test_a_job_that_is_found_by_its_name_is_scaled_and_other_programs_follow() -> None:
    provider = ScalingProvider()
    other = scalable(provider, timeout=60)
    other.scale("workers", 2, cached_path=None)
    other.scale("workers", 3, timeout=5)
    assert provider.asked == [("workers", 2, 60), ("workers", 3, 5)]
    mine = scalable(provider)
    mine.apply()
    assert mine._mesh_sizes() == {"workers": 3}
    mine.scale("workers", 4)
    assert provider.asked[2:] == [("workers", 4, 900)]
    assert (mine._mesh_sizes(), other._mesh_sizes()) == ({"workers": 4}, {"workers": 3})
    other.apply()
    assert other._mesh_sizes() == {"workers": 4}


def test_a_saved_job_has_the_new_number_of_hosts(tmp_path: Path) -> None:
    provider, path = ScalingProvider(), str(tmp_path / "job")
    job = scalable(provider)
    job.apply()
    job.dump(path)
    later = scalable(provider)
    later._cache_file = path  # as state() sets it
    later.scale("workers", 2, cached_path=path)
    again = job_load(path)
    assert isinstance(again, KubernetesJob)
    assert again._mesh_sizes() == {"workers": 2}


@pytest.mark.parametrize(
    ("mesh", "hosts", "message"),
    [
        ("workers", 0, "Mesh 'workers': hosts must be at least 1, not 0"),
        ("workers", -1, "hosts must be at least 1, not -1"),
        ("workers", 2.0, "hosts must be at least 1, not 2.0"),
        ("workers", True, "hosts must be at least 1, not True"),
        ("worker", 2, "the job has no mesh 'worker'; its meshes: workers.*Did you mean 'workers'"),
    ],
)
def test_a_mesh_is_not_scaled_to_something_else_than_a_number_of_hosts(mesh: str, hosts: Any, message: str) -> None:
    provider = ScalingProvider()
    with pytest.raises(ValueError, match=message):
        scalable(provider).scale(mesh, hosts, cached_path=None)
    assert provider.asked == []


def test_a_submitted_program_cannot_scale_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"kind": "KubernetesJob", "name": "trainer", "namespace": "default", "meshes": {"workers": 1}}
    monkeypatch.setenv("MESHGATE_RUN_JOB", json.dumps(here))
    for name, value in (("", "night"), ("_URL", "ws://127.0.0.1:1"), ("_TOKEN", "secret")):
        monkeypatch.setenv(f"MESHGATE_RUN{name}", value)
    monkeypatch.setattr(gateway_client, "request_json", lambda dialer, path: {"meshes": {"workers": 1}})
    with pytest.raises(
        JobUnsupported, match=r"the job of the run night cannot be scaled by a program that was submitted"
    ):
        KubernetesJob(name="trainer").scale("workers", 2)


def test_a_job_that_has_ended_is_not_scaled() -> None:
    provider = ScalingProvider()
    provider.refreshed = lambda job: None  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(JobNotRunning):
        scalable(provider).scale("workers", 2, cached_path=None)
