"""Waits until a job is ready, reports its progress, and gives up as soon as waiting is pointless.

``diagnosis`` finds the problems at one moment. This module tracks how long they last, and adds the last output of
crashed containers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import KubernetesError, NotFound
from meshgate_kubernetes.manifests import job_objects as manifests
from meshgate_kubernetes.manifests.names import COMPONENT_LABEL, Names
from meshgate_kubernetes.manifests.spec import JobSpec, Object
from meshgate_kubernetes.status.diagnosis import (
    PULL_TIMEOUT,
    Cluster,
    ExaminedPod,
    Problem,
    Stage,
    controller_problems,
    examine_pod,
    group_problems,
)
from meshgate_kubernetes.status.discovery import pods_by_rank
from meshgate_kubernetes.status.observer import Observer, WatchTarget

HEARTBEAT = 5.0
_LOG_LINES = 20
_EVENT_FIELDS = ",".join(f"reason!={each}" for each in ("FailedScheduling", "Scheduled", "SuccessfulCreate"))
"""Most events of a job with many pods; what they say, the pods' conditions say as well."""
OPERATOR_TIMEOUT = 60.0
SELECTOR_TIMEOUT = 15.0


class EventIndex:
    """Events in the given order. Each look at a thousand pods asks for the events of every one of them."""

    def __init__(self, events: Iterable[Object]) -> None:
        self.all = tuple(events)
        self._by_uid: dict[str, list[Object]] = {}
        for event in self.all:
            self._by_uid.setdefault(event["involvedObject"].get("uid", ""), []).append(event)

    def about(self, obj: Object) -> list[Object]:
        return self._by_uid.get(str(obj["metadata"].get("uid")), [])


@dataclass(frozen=True, slots=True)
class MeshProgress:
    """The number of pods of a mesh (or ``gateway``) at each stage, and the number wanted."""

    name: str
    wanted: int
    stages: tuple[tuple[Stage, int], ...]

    @property
    def ready(self) -> bool:
        return dict(self.stages).get(Stage.READY, 0) >= self.wanted > 0


@dataclass(frozen=True, slots=True)
class Progress:
    meshes: tuple[MeshProgress, ...]
    problems: tuple[Problem, ...]
    trouble: str = ""


class ProgressListener(Protocol):
    """Receives the progress of a starting job, on the waiting thread. An exception that it raises ends the wait."""

    def created(self, obj: Object) -> None:
        """The API server has created an object."""

    def progress(self, progress: Progress) -> None:
        """The pods or their problems have changed, or ``HEARTBEAT`` seconds have passed."""


class JobNotReady(KubernetesError):
    """The job did not become ready. ``problems`` says why; ``waiting_for`` names what was not ready."""

    def __init__(
        self, job: str, problems: Sequence[Problem], waiting_for: Sequence[str], timeout: float | None
    ) -> None:
        self.problems = tuple(problems)
        self.waiting_for = tuple(waiting_for)
        head = f"job {job!r} did not become ready"
        if timeout is not None:
            head += f" within {timeout:g} s; not ready: {', '.join(waiting_for)}"
        super().__init__("\n".join([f"{head}:" if problems else head, *(f"  {each}" for each in problems)]))

    def with_note(self, note: str) -> JobNotReady:
        """This error with another line."""
        self.args = (f"{self}\n{note}",)
        return self


def wait_ready(api: Api, spec: JobSpec, uid: str, listener: ProgressListener, timeout: float | None) -> None:
    """Returns when the gateway and all meshes of the job are ready. ``uid`` identifies the job's parent.

    Raises JobNotReady as soon as waiting is pointless, and NotFound if the job is deleted meanwhile.
    """
    started = time.monotonic()
    job = Names(spec.name).selector()
    targets = [
        WatchTarget("ConfigMap", job),
        WatchTarget("Event", optional=True, fields=_EVENT_FIELDS),
        WatchTarget("Pod", Names(spec.name).gateway_selector()),
    ]
    targets += [WatchTarget("Pod", mesh.selector) for mesh in spec.meshes]
    with Observer(api, spec.namespace, targets) as observer:
        tracker = _Tracker(api, spec, observer)
        version = -1
        while True:
            interval = HEARTBEAT if timeout is None else min(HEARTBEAT, started + timeout - time.monotonic())
            version = observer.wait(version, tracker.time_left(interval))
            if observer.listed and not any(_is_live(uid, parent) for parent in observer.objects("ConfigMap")):
                raise NotFound(
                    f"job {spec.name!r} was deleted while it started: by another program, or by its idle timeout of "
                    f"{spec.idle_timeout} s; apply it again"
                )
            looked = time.thread_time()
            progress = tracker.update()
            listener.progress(progress)
            if all(mesh.ready for mesh in progress.meshes):
                return
            hopeless = tracker.hopeless()
            timed_out = timeout is not None and time.monotonic() - started >= timeout
            if hopeless or timed_out:
                raise tracker.failure(hopeless, None if hopeless else timeout)
            observer.collect(time.thread_time() - looked)


def _is_live(uid: str, parent: Object) -> bool:
    return parent["metadata"]["uid"] == uid and "deletionTimestamp" not in parent["metadata"]


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The pods of a job at one moment: of the gateway, and of each mesh by rank."""

    gateway: Sequence[ExaminedPod]
    meshes: Mapping[str, Mapping[int, ExaminedPod]]

    @property
    def pods(self) -> list[ExaminedPod]:
        return [*self.gateway, *(pod for pods in self.meshes.values() for pod in pods.values())]


class _Tracker:
    """Tracks the problems of a job and how long they last."""

    def __init__(self, api: Api, spec: JobSpec, observer: Observer) -> None:
        self._api = api
        self._spec = spec
        self._observer = observer
        self._since: dict[tuple[str, str], float] = {}  # by Problem.key
        self._snapshot = _Snapshot((), {})
        self._problems: list[Problem] = []
        self._examined: dict[str, ExaminedPod] = {}  # by uid
        self._cluster: Cluster | None = None
        self._cluster_read = False

    def update(self) -> Progress:
        events = self._events()
        self._look(events)
        if not self._cluster_read and any(each.reason == "Unschedulable" for each in self._problems):
            self._cluster_read = True
            self._cluster = read_cluster(self._api)
            self._examined = {}
            self._look(events)
        now = time.monotonic()
        current = {each.key for each in self._problems}
        self._since = {key: self._since.get(key, now) for key in current}
        return Progress(
            meshes=tuple(_stages(self._spec, self._snapshot)),
            problems=tuple(group_problems(self._problems)),
            trouble="" if self._observer.trouble is None else str(self._observer.trouble),
        )

    def hopeless(self) -> list[Problem]:
        now = time.monotonic()
        return [each for each in self._problems if (end := self._end(each)) is not None and now >= end]

    def time_left(self, at_most: float) -> float:
        """Seconds until a problem exceeds its timeout, at most ``at_most``."""
        now = time.monotonic()
        ends = [end - now for each in self._problems if (end := self._end(each)) is not None]
        return max(0.0, min([*ends, at_most]))

    def _end(self, problem: Problem) -> float | None:
        """When waiting is pointless if the problem lasts. An image that cannot be pulled is often not the only one, so
        the images of the other pods are awaited, to name all at once."""
        if problem.timeout is None:
            return None
        images = problem.about_image and not _images_known(self._spec, self._snapshot)
        return self._since[problem.key] + (max(problem.timeout, PULL_TIMEOUT) if images else problem.timeout)

    def failure(self, hopeless: Sequence[Problem], timeout: float | None) -> JobNotReady:
        reasons = {(each.reason, each.message) for each in hopeless}  # of other pods too, only not for long enough
        images = any(each.about_image for each in hopeless)
        shown = [
            each
            for each in self._problems
            if not hopeless or (each.reason, each.message) in reasons or (images and each.about_image)
        ]
        with self._api.impatiently():  # the user waits for what is known already
            problems = [self._with_log(each) for each in group_problems(shown)]
            if images:
                problems += self._missing_pull_secrets()
        return JobNotReady(self._spec.name, problems, _not_ready(self._spec, self._snapshot), timeout)

    def _look(self, events: EventIndex) -> None:
        gateway = self._observer.objects("Pod", Names(self._spec.name).gateway_selector())
        meshes = {
            mesh.name: pods_by_rank(mesh, self._observer.objects("Pod", mesh.selector)) for mesh in self._spec.meshes
        }
        self._snapshot = _Snapshot(
            gateway=[self._examine(pod, events) for pod in gateway if "deletionTimestamp" not in pod["metadata"]],
            meshes={
                name: {rank: self._examine(pod, events) for rank, pod in pods.items()} for name, pods in meshes.items()
            },
        )
        self._problems = []
        if self._observer.listed:  # otherwise the snapshot is incomplete
            self._problems += [problem for pod in self._snapshot.pods for problem in pod.problems]
            self._problems += controller_problems(events.all, _missing(self._spec, self._snapshot))
            self._problems += _meshes_without_pods(self._spec, self._snapshot)

    def _examine(self, pod: Object, events: EventIndex) -> ExaminedPod:
        """Examines the pod unless neither it nor the events about it have changed: of a thousand pods, few have."""
        uid, about = pod["metadata"]["uid"], events.about(pod)
        known = self._examined.get(uid)
        if known is None or known.pod is not pod or known.events != about:
            known = self._examined[uid] = examine_pod(pod, about, self._cluster)
        return known

    def _missing_pull_secrets(self) -> Iterator[Problem]:
        """Kubelets pull without those that do not exist, and registries then say that the image does not exist."""
        pods = (each.pod["spec"].get("imagePullSecrets") or [] for each in self._snapshot.pods)
        for name in sorted({name for secrets in pods for each in secrets if (name := each.get("name"))}):
            try:
                self._api.get("Secret", name, self._spec.namespace)
            except NotFound:
                message = (
                    f"the pod names it, but it does not exist in namespace {self._spec.namespace!r}: create it with "
                    "`kubectl create secret docker-registry`"
                )
                yield Problem(f"secret {name}", "NotFound", message)
            except KubernetesError:  # this user may not know
                return

    def _with_log(self, problem: Problem) -> Problem:
        source = problem.log_of
        if source is None:
            return problem
        try:
            log = self._api.read_log(
                source.pod, self._spec.namespace, source.container, lines=_LOG_LINES, previous=source.previous
            )
        except KubernetesError as error:
            log = f"(cannot read its log: {error})"
        return problem.with_log(log)

    def _events(self) -> EventIndex:
        """Events since the job was created, without those of an earlier job of the same name."""
        parents = self._observer.objects("ConfigMap")
        since = min((parent["metadata"]["creationTimestamp"] for parent in parents), default="")
        found = [event for event in self._observer.objects("Event") if _time_of(event) >= since]
        return EventIndex(sorted(found, key=_time_of))


def _time_of(event: Object) -> str:
    series = event.get("series") or {}
    return str(
        series.get("lastObservedTime")
        or event.get("lastTimestamp")
        or event.get("eventTime")
        or event["metadata"].get("creationTimestamp", "")
    )


def read_cluster(api: Api) -> Cluster | None:
    """The nodes, and the pods of all namespaces. Most users of a shared cluster may list neither."""
    try:
        nodes, _ = api.list_objects("Node", "")
    except KubernetesError:
        return None
    try:
        pods, _ = api.list_objects("Pod", "", fields="status.phase!=Succeeded,status.phase!=Failed")
    except KubernetesError:
        pods = []
    return Cluster(nodes, pods)


def _stages(spec: JobSpec, snapshot: _Snapshot) -> Iterator[MeshProgress]:
    yield _progress_of("gateway", sum(spec.gateway_pods.values()), snapshot.gateway)
    for mesh in spec.meshes:
        pods = snapshot.meshes[mesh.name].values()
        yield _progress_of(mesh.name, mesh.replicas or max(1, len(pods)), pods)


def _progress_of(name: str, wanted: int, pods: Collection[ExaminedPod]) -> MeshProgress:
    counts = Counter(pod.stage for pod in pods)
    if (absent := wanted - len(pods)) > 0:
        counts[Stage.PENDING] += absent
    return MeshProgress(name, wanted, tuple((at, counts[at]) for at in Stage if at in counts))


def _images_known(spec: JobSpec, snapshot: _Snapshot) -> bool:
    """Whether each pod of the job has its image, or a problem."""
    wanted = sum(spec.gateway_pods.values()) + sum(mesh.replicas for mesh in spec.meshes)
    return len(snapshot.pods) >= wanted and all(
        pod.problems or pod.stage is Stage.READY or _has_image(pod.pod) for pod in snapshot.pods
    )


def _has_image(pod: Object) -> bool:
    status = pod.get("status", {})
    return any(
        each.get("imageID")
        for kind in ("initContainerStatuses", "containerStatuses")
        for each in status.get(kind) or []
    )


def _missing(spec: JobSpec, snapshot: _Snapshot) -> dict[str, int]:
    """How many pods each controller of the job has yet to create."""
    names = Names(spec.name)
    present = Counter(each.pod["metadata"]["labels"].get(COMPONENT_LABEL) for each in snapshot.gateway)
    found = {
        f"replicaset {names.deployment(component)}": wanted - present[component]
        for component, wanted in spec.gateway_pods.items()
    }
    for mesh in spec.meshes:
        if mesh.way == "selector":
            continue
        monarch = mesh.way == "monarchmesh"
        name = manifests.monarch_mesh_name(spec.name, mesh.name) if monarch else names.mesh(mesh.name)
        found[f"statefulset {name}"] = mesh.replicas - len(snapshot.meshes[mesh.name])
    return found


def _meshes_without_pods(spec: JobSpec, snapshot: _Snapshot) -> Iterator[Problem]:
    for mesh in spec.meshes:
        if snapshot.meshes[mesh.name]:
            continue
        if mesh.way == "monarchmesh":
            name = manifests.monarch_mesh_name(spec.name, mesh.name)
            message = "the MonarchMesh operator has not created a pod: check that it is running"
            yield Problem(f"monarchmesh {name}", "NoPods", message, OPERATOR_TIMEOUT)
        elif mesh.way == "selector":
            message = f"no pod with a rank matches the selector {mesh.selector!r}"
            yield Problem(f"mesh {mesh.name}", "NoPods", message, SELECTOR_TIMEOUT)


def _not_ready(spec: JobSpec, snapshot: _Snapshot) -> list[str]:
    """The pods that are not ready by name, and the number of pods that do not exist."""
    gateway = [pod for pod in snapshot.gateway if pod.stage is Stage.READY]
    names = [] if len(gateway) >= sum(spec.gateway_pods.values()) else ["the gateway"]
    for mesh in spec.meshes:
        pods = snapshot.meshes[mesh.name]
        names += [pod.pod["metadata"]["name"] for pod in pods.values() if pod.stage is not Stage.READY]
        if (absent := max(mesh.replicas, 1) - len(pods)) > 0:
            names.append(f"{absent} {'pod' if absent == 1 else 'pods'} of mesh {mesh.name!r} (not created yet)")
    return names
