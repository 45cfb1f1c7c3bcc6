"""Waiting for a job: progress, the timeouts of problems, and the error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import Forbidden, NotFound, Unreachable
from meshgate_kubernetes.jobs import objects
from meshgate_kubernetes.manifests.names import COMPONENT_LABEL, Names
from meshgate_kubernetes.manifests.spec import GatewaySpec, JobSpec
from meshgate_kubernetes.status import readiness
from meshgate_kubernetes.status.diagnosis import Stage, controller_problems, examine_pod
from meshgate_kubernetes.status.observer import Observer
from meshgate_kubernetes.status.readiness import EventIndex, JobNotReady, Progress, _Tracker, wait_ready
from tests.clusters.kubernetes.fake_api import FakeApi
from tests.clusters.kubernetes.objects import Object, event, found_mesh, job, mesh, pod, waiting

GATEWAY = pod("trainer-gateway-0")
GATEWAY["metadata"]["labels"] = {COMPONENT_LABEL: "gateway"}


class Reports:
    """Records the progress reports."""

    def __init__(self) -> None:
        self.all: list[Progress] = []

    def created(self, obj: Object) -> None: ...

    def progress(self, progress: Progress) -> None:
        self.all.append(progress)


class Cluster:
    """What an Observer has listed, as a table; the log of every container; and the names of the ``secrets``, None if
    the user may not read them. The error must not wait for an API server that is busy."""

    listed = True
    trouble = None

    def __init__(self, *pods: Object, events: tuple[Object, ...] = (), log: str = "") -> None:
        self.pods, self.events, self.log = list(pods), list(events), log
        self.secrets: set[str] | None = set()
        self.patient = True

    @contextmanager
    def impatiently(self) -> Iterator[None]:
        self.patient = False
        yield
        self.patient = True

    def objects(self, kind: str, selector: str | None = None) -> list[Object]:
        if kind == "Pod":
            return [GATEWAY] if selector == Names("trainer").gateway_selector() else self.pods
        return {"Event": self.events}.get(kind, [])

    def get(self, kind: str, name: str, namespace: str) -> Object:
        assert (kind, namespace, self.patient, bool(name)) == ("Secret", "team", False, True)
        if self.secrets is None:
            raise Forbidden("get", "secrets", namespace)
        if name not in self.secrets:
            raise NotFound(f"secrets {name!r} not found")
        return {}

    def read_log(self, *container: str, lines: int, previous: bool) -> str:
        assert not self.patient
        return self.log


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(readiness, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def tracker(cluster: Cluster, spec: JobSpec | None = None) -> _Tracker:
    return _Tracker(cast("Api", cluster), spec or job(), cast("Observer", cluster))


def pulling(reason: str) -> Object:
    return waiting(reason, "dial tcp: i/o timeout")


def test_a_job_is_ready_when_its_gateway_and_all_meshes_are() -> None:
    fake = FakeApi()
    api, spec, reports = cast("Api", fake), job(), Reports()
    parent = objects.create_parent(api, spec)
    objects.create_owned(api, spec, parent, reports)
    wait_ready(api, spec, parent["metadata"]["uid"], reports, timeout=20)
    assert [(mesh.name, mesh.stages) for mesh in reports.all[-1].meshes] == [
        ("gateway", ((Stage.READY, 1),)),
        ("workers", ((Stage.READY, 2),)),
    ]
    assert all(mesh.ready for mesh in reports.all[-1].meshes)


def test_gateways_that_forward_are_awaited_with_the_pod_of_the_engines() -> None:
    waiting_for = tracker(
        Cluster(pod("trainer-workers-0"), pod("trainer-workers-1")), job(gateway=GatewaySpec(replicas=2))
    )
    gateway, workers = waiting_for.update().meshes
    assert (gateway.wanted, gateway.stages) == (3, ((Stage.PENDING, 2), (Stage.READY, 1)))
    assert workers.ready
    assert str(waiting_for.failure([], 5)).endswith("not ready: the gateway")


def test_missing_pods_are_pending() -> None:
    gateway, workers = tracker(Cluster(pod("trainer-workers-0"))).update().meshes
    assert gateway.ready
    assert not workers.ready
    assert (workers.wanted, workers.stages) == (2, ((Stage.PENDING, 1), (Stage.READY, 1)))


def test_a_problem_is_hopeless_only_after_its_timeout(clock: Clock) -> None:
    cluster = Cluster(pulling("ErrImagePull"))
    tracked = tracker(cluster)
    tracked.update()
    assert tracked.time_left(60) == 20
    clock.now = 19.0
    cluster.pods = [pulling("ImagePullBackOff")]  # the same problem, under its other reason
    tracked.update()
    assert (tracked.hopeless(), tracked.time_left(60)) == ([], 1)
    clock.now = 20.0
    (problem,) = tracked.hopeless()
    assert problem.subject == "pod trainer-workers-0"
    assert tracked.time_left(60) == 0


def test_a_problem_that_passes_and_returns_starts_its_timeout_again(clock: Clock) -> None:
    cluster = Cluster(pulling("ErrImagePull"))
    tracked = tracker(cluster)
    tracked.update()
    clock.now, cluster.pods = 19.0, [pod("trainer-workers-0")]
    tracked.update()
    clock.now, cluster.pods = 21.0, [pulling("ErrImagePull")]
    tracked.update()
    assert tracked.hopeless() == []


def test_of_many_pods_only_those_that_have_changed_are_examined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    examined: list[str] = []

    def examine(pod: Object, *known: Any) -> Any:
        examined.append(pod["metadata"]["name"])
        return examine_pod(pod, *known)

    monkeypatch.setattr(readiness, "examine_pod", examine)
    pods = [pod(f"trainer-workers-{rank}", ready=False) for rank in range(3)]
    cluster = Cluster(*pods)
    tracked = tracker(cluster, job(mesh(replicas=3)))
    tracked.update()
    tracked.update()
    assert examined == ["trainer-gateway-0", *(f"trainer-workers-{rank}" for rank in range(3))]
    examined.clear()
    cluster.pods[0] = pod("trainer-workers-0")
    cluster.events = (event(pods[1], "Pulling"),)
    workers = tracked.update().meshes[1]
    assert examined == ["trainer-workers-0", "trainer-workers-1"]
    assert dict(workers.stages) == {Stage.READY: 1, Stage.PULLING: 1, Stage.STARTING: 1}


def test_an_incomplete_list_has_no_problems() -> None:
    cluster = Cluster(pulling("InvalidImageName"))
    cluster.listed = False
    assert tracker(cluster).update().problems == ()


def test_a_mesh_without_pods_is_a_problem_with_its_selector() -> None:
    spec = job(found_mesh(selector="app=mine"))
    (problem,) = tracker(Cluster(), spec).update().problems
    assert str(problem) == "mesh workers: NoPods: no pod with a rank matches the selector 'app=mine'"
    assert problem.timeout == 15.0


def test_a_mesh_that_the_operator_does_not_create_is_a_problem() -> None:
    spec = job()
    monarch = spec.meshes[0].model_copy(update={"way": "monarchmesh"})
    (problem,) = tracker(Cluster(), spec.model_copy(update={"meshes": (monarch,)})).update().problems
    assert "the MonarchMesh operator has not created a pod: check that it is running" in str(problem)
    assert problem.timeout == 60.0


def test_events_of_an_earlier_job_are_ignored() -> None:
    failed = event(
        {"kind": "StatefulSet", "metadata": {"name": "trainer-workers"}},
        "FailedCreate",
        "denied",
        at="2025-12-31T00:00:00Z",
    )
    cluster = Cluster(events=(failed,))
    assert len(tracker(cluster).update().problems) == 1
    parent = {"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}}
    objects_of = cluster.objects
    cluster.objects = lambda kind, selector=None: [parent] if kind == "ConfigMap" else objects_of(kind, selector)  # type: ignore[method-assign]
    assert tracker(cluster).update().problems == ()


def test_the_error_lists_problems_with_their_logs() -> None:
    crash = waiting("CrashLoopBackOff", lastState={"terminated": {"exitCode": 1}}, restartCount=1)
    tracked = tracker(Cluster(crash, log="no config\n"))
    tracked.update()
    assert str(tracked.failure(tracked.hopeless(), None)) == (
        "job 'trainer' did not become ready:\n"
        "  pod trainer-workers-0: CrashLoopBackOff: container worker ended with exit code 1, 2 times. "
        "Its last output:\n"
        "    no config"
    )


def test_the_error_counts_pods_whose_equal_problem_is_newer(clock: Clock) -> None:
    pods = [pulling("ErrImagePull") for _ in range(3)]
    for rank, each in enumerate(pods):
        each["metadata"] |= {"name": f"trainer-workers-{rank}", "uid": f"uid-{rank}"}
    cluster = Cluster(pods[0])
    tracked = tracker(cluster, job(mesh(replicas=3)))
    tracked.update()
    clock.now, cluster.pods = 20.0, pods
    tracked.update()
    (problem,) = tracked.hopeless()
    assert "3 pods (trainer-workers-0, trainer-workers-1, …): ErrImagePull" in str(tracked.failure([problem], None))


def unpullable(rank: int) -> Object:
    made = waiting("ErrImagePull", f'rpc error: failed to pull image "worker:{rank}": not found')
    made["metadata"] |= {"name": f"trainer-workers-{rank}", "uid": f"uid-{rank}"}
    return made


def starting(**status: Any) -> Object:
    """A pod of rank 1 that waits for its image."""
    container = {"name": "worker", "state": {"waiting": {"reason": "ContainerCreating"}}, **status}
    return pod("trainer-workers-1", ready=False, containerStatuses=[container])


def test_an_image_that_cannot_be_pulled_is_reported_with_those_of_the_other_pods(clock: Clock) -> None:
    cluster = Cluster(unpullable(0))
    tracked = tracker(cluster)
    for cluster.pods in ([unpullable(0)], [unpullable(0), starting()]):
        tracked.update()
        assert (tracked.hopeless(), tracked.time_left(60)) == ([], 20)
    cluster.pods = [unpullable(0), unpullable(1)]
    tracked.update()
    error = str(tracked.failure(tracked.hopeless(), None))
    assert "pod trainer-workers-0: ErrImagePull" in error
    assert "pod trainer-workers-1: ErrImagePull" in error


@pytest.mark.parametrize(("secrets", "missing"), [(set(), ["b", "regcred"]), ({"b"}, ["regcred"]), (None, [])])
def test_pull_secrets_that_do_not_exist_are_named_with_the_images(secrets: set[str] | None, missing: list[str]) -> None:
    pods = [unpullable(0), unpullable(1)]
    for each in pods:
        each["spec"]["imagePullSecrets"] = [{"name": "regcred"}, {"name": "b"}, {}, {"name": ""}]
    cluster = Cluster(*pods)
    cluster.secrets = secrets
    tracked = tracker(cluster)
    tracked.update()
    lines = str(tracked.failure(tracked.hopeless(), None)).splitlines()
    found = [line for line in lines if line.startswith("  secret ")]
    assert [line.split(":")[0] for line in found] == [f"  secret {name}" for name in missing]
    assert all(
        "the pod names it, but it does not exist in namespace 'team': create it with `kubectl create" in line
        for line in found
    )


def test_the_images_of_other_pods_are_not_awaited_for_long(clock: Clock) -> None:
    tracked = tracker(Cluster(unpullable(0), starting()))
    tracked.update()
    clock.now = 20.0
    assert [each.subject for each in tracked.hopeless()] == ["pod trainer-workers-0"]


def test_a_pod_that_has_its_image_is_not_awaited(clock: Clock) -> None:
    tracked = tracker(Cluster(unpullable(0), starting(imageID="sha256:1")))
    tracked.update()
    assert [each.subject for each in tracked.hopeless()] == ["pod trainer-workers-0"]


def test_an_image_that_may_still_be_pulled_is_named_beside_one_that_cannot(clock: Clock) -> None:
    slow = pulling("ImagePullBackOff")
    slow["metadata"] |= {"name": "trainer-workers-1", "uid": "uid-1"}
    tracked = tracker(Cluster(unpullable(0), slow))
    tracked.update()
    assert "pod trainer-workers-1: ImagePullBackOff" in str(tracked.failure(tracked.hopeless(), None))


def test_a_log_that_cannot_be_read_does_not_hide_the_problem() -> None:
    class WithoutLogs(Cluster):
        def read_log(self, *container: str, **options: Any) -> str:
            raise Unreachable("no response")

    crash = waiting("CrashLoopBackOff", lastState={"terminated": {"exitCode": 1}}, restartCount=1)
    tracked = tracker(WithoutLogs(crash))
    tracked.update()
    assert "(cannot read its log: no response)" in str(tracked.failure(tracked.hopeless(), None))


def test_the_error_after_a_timeout_lists_what_is_not_ready() -> None:
    tracked = tracker(Cluster(pod("trainer-workers-0", ready=False)))
    tracked.update()
    error = tracked.failure([], 3)
    assert error.waiting_for == ("trainer-workers-0", "1 pod of mesh 'workers' (not created yet)")
    assert str(error).startswith(
        "job 'trainer' did not become ready within 3 s; "
        "not ready: trainer-workers-0, 1 pod of mesh 'workers' (not created yet)"
    )


def test_a_note_is_the_last_line_of_the_error() -> None:
    assert str(JobNotReady("trainer", [], [], None).with_note("it is kept")).splitlines()[-1] == "it is kept"


class Event(dict[str, Any]):
    reads = 0

    def __getitem__(self, key: str) -> Any:
        Event.reads += key == "involvedObject"
        return super().__getitem__(key)


def test_a_look_at_a_thousand_pods_reads_each_event_a_few_times() -> None:
    pods = [pod(f"a-{number}", ready=False) for number in range(1000)]
    involved = [{"kind": "Pod", "name": each["metadata"]["name"], "uid": each["metadata"]["uid"]} for each in pods]
    index = EventIndex(Event(reason="Pulling", involvedObject=involved[number % 1000]) for number in range(5000))
    examined = [examine_pod(each, index.about(each)) for each in pods]
    assert list(controller_problems(index.all, {"statefulset a": 1})) == []
    assert {each.stage for each in examined} == {Stage.PULLING}
    assert Event.reads <= 3 * 5000


def test_events_are_found_by_the_uid_of_their_object_in_order() -> None:
    events = [{"reason": str(number), "involvedObject": {"uid": f"uid-{name}"}} for number, name in enumerate("aba")]
    assert [event["reason"] for event in EventIndex(events).about(pod("a"))] == ["0", "2"]
    assert EventIndex(events).about(pod("c")) == []
