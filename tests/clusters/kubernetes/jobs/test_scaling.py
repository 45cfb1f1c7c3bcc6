"""A mesh of a running job grows and shrinks, completely or not at all."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import pytest

from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import Conflict, Forbidden, NotFound, Rejected, Unreachable
from meshgate_kubernetes.jobs import lifecycle, objects
from meshgate_kubernetes.jobs.lifecycle import RunningJob
from meshgate_kubernetes.jobs.scaling import scale
from meshgate_kubernetes.manifests.job_objects import CHANGE_ANNOTATION
from meshgate_kubernetes.manifests.spec import JobSpec, MeshSpec
from meshgate_kubernetes.status import readiness
from meshgate_kubernetes.status.readiness import JobNotReady, Progress
from tests.clusters.kubernetes.fake_api import FakeApi, IgnoreProgress
from tests.clusters.kubernetes.objects import Object, found_mesh, job, mesh

WORKERS = ["trainer-workers-0", "trainer-workers-1"]


@pytest.fixture(autouse=True)
def _short_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "HEARTBEAT", 0.05)


class Scaled:
    """A running job. ``reads`` are the numbers of hosts and the pods at each time that its gateway reads the number."""

    def __init__(self, api: FakeApi, spec: JobSpec | None = None) -> None:
        self.api, self.spec = api, spec or job()
        self.running = self.start(self.spec)
        self.reads: list[tuple[int, list[str]]] = []
        self.allowed: list[int] = []

    def start(self, spec: JobSpec) -> RunningJob:
        return lifecycle.start(cast("Api", self.api), spec, IgnoreProgress(), timeout=10)

    def scale(self, hosts: int, *, name: str = "workers", timeout: float = 10, **how: Any) -> RunningJob:
        given: dict[str, Any] = {"ask_gateway": self.ask, "require_allowed": self._allow, "listener": IgnoreProgress()}
        return scale(cast("Api", self.api), self.running, name, hosts, timeout=timeout, **{**given, **how})

    def _allow(self, grown: JobSpec) -> None:
        self.allowed.append(grown.meshes[0].replicas)

    def ask(self, path: str, body: bytes | None) -> Any:
        if (path, body) == ("/v1/job", b""):
            self.reads.append((self.hosts, self.pods))
            return {}
        assert (path, body) == ("/v1/status", None)
        return {"gateway_version": "0.1.0", "python": "3.11", "meshes": {}, "sessions": []}

    @property
    def hosts(self) -> int:
        return lifecycle.find(cast("Api", self.api), "trainer", "team").meshes["workers"]

    @property
    def pods(self) -> list[str]:
        names = (name for kind, _, name in self.api.left() if kind == "Pod")
        return sorted(name for name in names if "gateway" not in name)

    @property
    def replicas(self) -> int:
        return int(self.api.get("StatefulSet", "trainer-workers", "team")["spec"]["replicas"])


class OnProgress(IgnoreProgress):
    """Calls ``action`` once, while new hosts are awaited."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._actions = [action]

    def progress(self, progress: Progress) -> None:
        while self._actions:
            self._actions.pop()()


def test_a_mesh_grows_and_its_number_of_hosts_is_known_everywhere_once_they_are_ready() -> None:
    scaled = Scaled(FakeApi())
    grown = scaled.scale(4)
    every = [f"trainer-workers-{rank}" for rank in range(4)]
    assert scaled.reads == [(2, WORKERS), (4, every)]
    assert grown == scaled.running.model_copy(update={"meshes": {"workers": 4}})
    api = cast("Api", scaled.api)
    assert lifecycle.find(api, "trainer", "team") == lifecycle.refreshed(api, scaled.running) == grown
    assert objects.read_spec(api, "trainer", "team")[0].meshes[0].replicas == 4
    assert lifecycle.list_jobs(api)[0].meshes == {"workers": 4}
    assert scaled.allowed == [4]
    assert scaled.api.impatient == []  # a busy API server would leave the change half done


def test_a_mesh_shrinks_by_its_last_hosts_which_no_longer_count_when_their_pods_end() -> None:
    scaled = Scaled(FakeApi())
    assert scaled.scale(1).meshes == {"workers": 1}
    assert scaled.allowed == []  # hosts may always be given back
    assert scaled.reads == [(2, WORKERS), (1, WORKERS)]
    assert (scaled.hosts, scaled.pods) == (1, WORKERS[:1])


def test_a_growth_that_is_not_allowed_changes_nothing() -> None:
    def refuse(grown: JobSpec) -> None:
        raise Rejected(f"{grown.meshes[0].replicas} are too many")

    scaled = Scaled(FakeApi())
    with pytest.raises(Rejected, match="3 are too many"):
        scaled.scale(3, require_allowed=refuse)
    assert (scaled.hosts, scaled.replicas, scaled.reads) == (2, 2, [])


def test_a_later_job_of_the_same_name_is_not_scaled() -> None:
    scaled = Scaled(FakeApi())
    earlier = scaled.running
    lifecycle.end(cast("Api", scaled.api), earlier)
    scaled.start(scaled.spec)
    with pytest.raises(NotFound, match=r"'trainer' in namespace '.*' has ended, and another job has its name now"):
        scaled.scale(3)
    assert (scaled.hosts, scaled.replicas, scaled.reads) == (2, 2, [])


def test_hosts_that_do_not_become_ready_are_removed() -> None:
    scaled = Scaled(FakeApi())
    scaled.api.pods_come_up = False
    with pytest.raises(JobNotReady, match=r"within 0.1 s; not ready: trainer-workers-2"):
        scaled.scale(3, timeout=0.1)
    assert (scaled.hosts, scaled.replicas, scaled.pods) == (2, 2, WORKERS)
    assert scaled.reads == [(2, WORKERS)]


def test_an_interrupted_growth_is_taken_back() -> None:
    scaled = Scaled(FakeApi())
    reads: list[int] = []

    def interrupted(path: str, body: bytes | None) -> None:
        reads.append(scaled.hosts)
        if len(reads) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scaled.scale(3, ask_gateway=interrupted)
    assert (reads, scaled.hosts, scaled.replicas) == ([2, 3], 2, 2)


def test_the_failure_is_reported_even_if_the_growth_cannot_be_taken_back(caplog: pytest.LogCaptureFixture) -> None:
    scaled = Scaled(FakeApi())
    scaled.api.pods_come_up = False

    def fail(kind: str, name: str, namespace: str, change: Object) -> Object:
        raise Unreachable("the API server does not respond")

    with caplog.at_level(logging.WARNING), pytest.raises(JobNotReady):
        scaled.scale(3, timeout=0.1, listener=OnProgress(lambda: setattr(scaled.api, "merge_patch", fail)))
    assert "cannot take mesh 'workers' back to 2 hosts: the API server" in caplog.text
    assert "cannot record that the change of mesh 'workers' has ended" in caplog.text


@pytest.mark.parametrize("hosts", [1, 3])
def test_nothing_is_changed_if_the_gateway_cannot_read_the_number(hosts: int) -> None:
    def fail(path: str, body: bytes | None) -> None:
        raise ZeroDivisionError("an older gateway")

    scaled = Scaled(FakeApi())
    with pytest.raises(ZeroDivisionError):
        scaled.scale(hosts, ask_gateway=fail)
    assert (scaled.hosts, scaled.replicas) == (2, 2)


def test_a_change_that_was_interrupted_is_completed_by_repeating_it() -> None:
    scaled = Scaled(FakeApi())
    scaled.api.merge_patch("StatefulSet", "trainer-workers", "team", {"spec": {"replicas": 5}})  # then it was killed
    scaled.scale(2)
    assert scaled.pods == WORKERS


def test_of_two_changes_that_begin_at_once_one_is_refused() -> None:
    scaled = Scaled(FakeApi())
    others = [4]

    def ask(path: str, body: bytes | None) -> Any:
        while others:  # after this change has read the present number, and before it has begun
            scaled.scale(others.pop())
        return scaled.ask(path, body)

    with pytest.raises(Conflict, match=r"has changed the job at the same time: .*\(`meshgate ls -n team`\)"):
        scaled.scale(1, ask_gateway=ask)
    assert (scaled.hosts, scaled.replicas) == (4, 4)
    assert scaled.scale(1).meshes == {"workers": 1}


def test_a_change_is_refused_while_another_one_is_in_progress() -> None:
    scaled = Scaled(FakeApi())

    def change() -> None:
        with pytest.raises(
            Conflict, match=r"is changing mesh 'workers' to 3 hosts: .* scale -n team trainer workers 3`"
        ):
            scaled.scale(4)

    scaled.scale(3, listener=OnProgress(change))
    assert (scaled.hosts, scaled.replicas) == (3, 3)


def test_a_change_that_another_program_has_repeated_is_left_to_that(caplog: pytest.LogCaptureFixture) -> None:
    scaled = Scaled(FakeApi())
    with pytest.raises(Conflict, match="has changed the job at the same time"):
        scaled.scale(3, listener=OnProgress(lambda: scaled.scale(3)))
    assert (scaled.hosts, scaled.replicas, caplog.text) == (3, 3, "")
    assert scaled.scale(4).meshes == {"workers": 4}


def test_what_others_write_beside_the_number_of_hosts_does_not_disturb_a_change() -> None:
    scaled = Scaled(FakeApi())

    def label() -> None:
        labels = {"metadata": {"labels": {"argocd": "trainer"}}}
        scaled.api.merge_patch("ConfigMap", "trainer", "team", labels)

    def ask(path: str, body: bytes | None) -> Any:  # after the change has read the job, and before it begins
        label()
        return scaled.ask(path, body)

    assert scaled.scale(4, listener=OnProgress(label), ask_gateway=ask).meshes == {"workers": 4}
    assert scaled.scale(3).meshes == {"workers": 3}
    parent = scaled.api.get("ConfigMap", "trainer", "team")
    assert (parent["metadata"]["labels"]["argocd"], CHANGE_ANNOTATION in str(parent)) == ("trainer", False)


def test_a_change_ends_if_others_write_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = Scaled(FakeApi())
    get, versions = scaled.api.get, iter(range(10**6, 10**7))

    def get_an_older_version(kind: str, name: str, namespace: str) -> Object:
        found = get(kind, name, namespace)
        return {**found, "metadata": {**found["metadata"], "resourceVersion": str(next(versions))}}

    monkeypatch.setattr(scaled.api, "get", get_an_older_version)
    with pytest.raises(Conflict, match="has changed the job at the same time"):
        scaled.scale(4)


@pytest.mark.parametrize("lost", range(3), ids=["the first", "that of the number of hosts", "the last"])
def test_a_patch_whose_answer_was_lost_is_no_change_of_another_program(
    lost: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scaled = Scaled(FakeApi())
    patch, left = scaled.api.merge_patch, iter(range(10))

    def lose(kind: str, name: str, namespace: str, change: Object) -> Object:
        changed = patch(kind, name, namespace, change)
        if kind == "ConfigMap" and next(left) == lost:
            raise Unreachable("the connection was cut")
        return changed

    with monkeypatch.context() as context:
        context.setattr(scaled.api, "merge_patch", lose)
        if lost < 2:
            with pytest.raises(Unreachable, match="the connection was cut"):
                scaled.scale(4)
            assert (scaled.hosts, scaled.replicas, caplog.text) == (2, 2, "")
        else:
            assert scaled.scale(4).meshes == {"workers": 4}
            assert "others may be refused until it is repeated" in caplog.text
    assert scaled.scale(4).meshes == {"workers": 4}
    assert scaled.scale(1).meshes == {"workers": 1}


def test_a_change_has_ended_if_the_patch_that_says_so_is_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scaled = Scaled(FakeApi())
    patch = scaled.api.merge_patch

    def repeat_the_last(kind: str, name: str, namespace: str, change: Object) -> Object:
        changed = patch(kind, name, namespace, change)
        ends = change.get("metadata", {}).get("annotations") == {CHANGE_ANNOTATION: None}
        return patch(kind, name, namespace, change) if ends else changed

    monkeypatch.setattr(scaled.api, "merge_patch", repeat_the_last)
    assert scaled.scale(4).meshes == {"workers": 4}
    assert caplog.text == ""


def test_pods_that_stay_after_their_host_was_removed_are_named() -> None:
    scaled = Scaled(FakeApi())
    scaled.api._make_pods = lambda owner: None  # type: ignore[method-assign]
    with pytest.raises(
        Rejected, match=r"it has 1 hosts now, but after 0.05 s these pods still exist: trainer-workers-1"
    ):
        scaled.scale(1, timeout=0.05)
    assert scaled.hosts == 1


class WithoutRights(FakeApi):
    def list_rules(self, namespace: str) -> list[Object]:
        return [{"verbs": ["create", "get", "list", "watch", "delete"], "apiGroups": ["*"], "resources": ["*"]}]

    def is_allowed(self, attributes: Object) -> bool:
        return attributes["resource"] == "configmaps"

    def denied_user(self, verb: str, kind: str, namespace: str) -> str:
        return "bob"


def test_a_missing_permission_is_named_before_anything_is_changed() -> None:
    scaled = Scaled(WithoutRights())
    with pytest.raises(Forbidden, match=r"bob may not patch statefulsets.apps in namespace 'team'"):
        scaled.scale(3)
    assert (scaled.hosts, scaled.replicas, scaled.reads) == (2, 2, [])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (mesh("others", job="trainer"), "it has no such mesh, only others"),
        (mesh(queue_name="research"), "the queue 'research' admits all of its pods together"),
        (found_mesh(), "its pods are others'; only a mesh whose pods the job itself creates"),
        (mesh().model_copy(update={"way": "monarchmesh"}), "the MonarchMesh operator has created its pods"),
    ],
)
def test_some_meshes_cannot_be_scaled(given: MeshSpec, message: str) -> None:
    api = cast("Api", FakeApi())
    objects.create_parent(api, job(given))
    running = RunningJob(name="trainer", namespace="team", uid="", token="", meshes={"workers": 2})
    unused: Any = None
    with pytest.raises(Rejected, match=message):
        scale(api, running, "workers", 3, unused, timeout=1, ask_gateway=unused)


def test_a_scaled_job_is_found_by_its_first_specification_and_by_its_present_one() -> None:
    scaled = Scaled(FakeApi())
    grown = scaled.scale(3)
    assert scaled.start(scaled.spec) == grown
    assert scaled.start(job(mesh(replicas=3))) == grown
    with pytest.raises(Conflict, match="with a different specification is already running"):
        scaled.start(job(mesh(replicas=4)))
