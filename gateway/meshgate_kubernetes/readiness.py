"""Waits until a job is up: says what it waits for, and stops as soon as waiting on is hopeless.

``waiting`` judges what is wrong at one moment; here is how long it has been, what the user is told of it, and
the last lines of a container that crashed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from meshgate_kubernetes import manifests
from meshgate_kubernetes.api import Api
from meshgate_kubernetes.capacity import Cluster
from meshgate_kubernetes.discovery import ranked
from meshgate_kubernetes.errors import KubernetesError
from meshgate_kubernetes.names import COMPONENT_LABEL, Names
from meshgate_kubernetes.observe import Observer, Source
from meshgate_kubernetes.spec import JobSpec, MeshSpec, Object
from meshgate_kubernetes.waiting import Problem, Stage, diagnose, stage

__all__ = ["JobNotReady", "Listener", "MeshProgress", "Progress", "wait_ready"]

_LOG_LINES = 20


@dataclass(frozen=True, slots=True)
class MeshProgress:
    """How many pods of a mesh (or ``gateway``) are at each stage, of how many."""

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


class Listener(Protocol):
    """Told what happens while a job comes up or goes. Called on the thread that waits."""

    def created(self, obj: Object) -> None:
        """The API server has taken an object."""

    def progress(self, progress: Progress) -> None:
        """The pods or their problems have changed."""


class JobNotReady(KubernetesError):
    """The pods did not come up: why, one problem each. ``timed_out``: waiting on might have helped."""

    def __init__(
        self, job: str, problems: Sequence[Problem], waiting_for: Sequence[str], timeout: float | None
    ) -> None:
        self.problems = tuple(problems)
        self.waiting_for = tuple(waiting_for)
        self.timed_out = timeout is not None
        head = f"job {job!r} did not come up"
        if timeout is not None:
            head += f" within {timeout:g} s; not ready: {', '.join(waiting_for)}"
        super().__init__("\n".join([f"{head}:" if problems else head, *(f"  {each}" for each in problems)]))


def wait_ready(api: Api, spec: JobSpec, listener: Listener, timeout: float | None) -> None:
    """Returns when the gateway and every mesh are ready. Raises JobNotReady as soon as that is hopeless."""
    started = time.monotonic()
    selectors = [Names(spec.name).selector(), *(mesh.selector for mesh in spec.meshes)]
    sources = [Source("ConfigMap", selectors[0]), Source("Event", optional=True)]
    sources += [Source("Pod", selector) for selector in selectors]
    with Observer(api, spec.namespace, sources) as seen:
        waiter = _Waiter(api, spec, seen)
        version, told = -1, None
        while True:
            left = None if timeout is None else started + timeout - time.monotonic()
            version = seen.wait(version, waiter.patience_left(left))
            progress = waiter.look()
            if progress != told:
                listener.progress(progress)
                told = progress
            if all(mesh.ready for mesh in progress.meshes):
                return
            late = timeout is not None and time.monotonic() - started >= timeout
            hopeless = waiter.hopeless()
            if hopeless or late:
                waiting_for = [mesh.name for mesh in progress.meshes if not mesh.ready]
                problems = [waiter.with_log(each) for each in hopeless or progress.problems]
                late_pods = _not_ready(spec, seen, waiting_for)
                raise JobNotReady(spec.name, problems, late_pods, timeout if not hopeless else None)


class _Waiter:
    """What is wrong, and for how long it has been."""

    def __init__(self, api: Api, spec: JobSpec, seen: Observer) -> None:
        self._api = api
        self._spec = spec
        self._seen = seen
        self._since: dict[tuple[str, str], float] = {}
        self._problems: list[Problem] = []
        self._cluster: Cluster | None = None
        self._asked_cluster = False

    def look(self) -> Progress:
        pods, events = self._seen.objects("Pod"), self._events()
        missing = _missing(self._spec, pods)
        self._problems = diagnose(pods, events, missing=missing, cluster=self._cluster)
        if not self._asked_cluster and any(each.reason == "Unschedulable" for each in self._problems):
            self._asked_cluster = True
            self._cluster = _read_cluster(self._api)
            self._problems = diagnose(pods, events, missing=missing, cluster=self._cluster)
        self._problems += _no_operator(self._spec, pods)
        now = time.monotonic()
        present = {(each.subject, each.reason) for each in self._problems}
        self._since = {key: self._since.get(key, now) for key in present}
        trouble = self._seen.trouble
        return Progress(
            meshes=tuple(_stages(self._spec, pods, events)),
            problems=tuple(self._problems),
            trouble="" if trouble is None else str(trouble),
        )

    def hopeless(self) -> list[Problem]:
        now = time.monotonic()
        return [
            each
            for each in self._problems
            if each.patience is not None and now - self._since[each.subject, each.reason] >= each.patience
        ]

    def patience_left(self, at_most: float | None) -> float | None:
        """Seconds until a problem becomes hopeless if nothing changes."""
        now = time.monotonic()
        ends = [
            self._since[each.subject, each.reason] + each.patience - now
            for each in self._problems
            if each.patience is not None
        ]
        if at_most is not None:
            ends.append(at_most)
        return max(0.0, min(ends)) if ends else None

    def with_log(self, problem: Problem) -> Problem:
        if problem.log_of is None:
            return problem
        of = problem.log_of
        try:
            log = self._api.log(of.pod, self._spec.namespace, of.container, lines=_LOG_LINES, previous=of.previous)
        except KubernetesError as error:
            log = f"(its log cannot be read: {error})"
        return problem.with_log(log)

    def _events(self) -> list[Object]:
        """Events since this job was made: one of the same name before it has left some that look like ours."""
        parents = self._seen.objects("ConfigMap")
        since = min((parent["metadata"]["creationTimestamp"] for parent in parents), default="")
        found = [event for event in self._seen.objects("Event") if _time_of(event) >= since]
        return sorted(found, key=_time_of)


def _time_of(event: Object) -> str:
    series = event.get("series") or {}
    return str(
        series.get("lastObservedTime")
        or event.get("lastTimestamp")
        or event.get("eventTime")
        or event["metadata"].get("creationTimestamp", "")
    )


def _read_cluster(api: Api) -> Cluster | None:
    """Nodes, and pods of every namespace; most users of a shared cluster may see neither."""
    try:
        nodes, _ = api.find("Node", "")
    except KubernetesError:
        return None
    try:
        pods, _ = api.find("Pod", "", fields="status.phase!=Succeeded,status.phase!=Failed")
    except KubernetesError:
        pods = []
    return Cluster(nodes, pods)


def _gateway_pods(spec: JobSpec, pods: Sequence[Object]) -> list[Object]:
    selector = manifests.selector_object(f"{Names(spec.name).selector()},{COMPONENT_LABEL}=gateway")["matchLabels"]
    return [pod for pod in pods if selector.items() <= (pod["metadata"].get("labels") or {}).items()]


def _mesh_pods(mesh: MeshSpec, pods: Sequence[Object]) -> list[Object]:
    wanted = manifests.selector_object(mesh.selector).get("matchLabels", {})
    return [pod for pod in pods if wanted.items() <= (pod["metadata"].get("labels") or {}).items()]


def _stages(spec: JobSpec, pods: Sequence[Object], events: Sequence[Object]) -> Iterator[MeshProgress]:
    gateway = [pod for pod in _gateway_pods(spec, pods) if "deletionTimestamp" not in pod["metadata"]]
    yield _progress_of("gateway", 1, gateway, events)
    for mesh in spec.meshes:
        found = ranked(mesh, _mesh_pods(mesh, pods))
        progress = _progress_of(mesh.name, mesh.replicas or max(1, len(found)), list(found.values()), events)
        yield progress


def _progress_of(name: str, wanted: int, pods: Sequence[Object], events: Sequence[Object]) -> MeshProgress:
    counts: dict[Stage, int] = {}
    for pod in pods:
        at = stage(pod, events)
        counts[at] = counts.get(at, 0) + 1
    if (absent := wanted - len(pods)) > 0:
        counts[Stage.PENDING] = counts.get(Stage.PENDING, 0) + absent
    return MeshProgress(name, wanted, tuple((at, counts[at]) for at in Stage if at in counts))


def _missing(spec: JobSpec, pods: Sequence[Object]) -> dict[str, int]:
    """How many pods each controller of the job has yet to make."""
    names = Names(spec.name)
    found = {f"replicaset {names.gateway}": 1 - len(_gateway_pods(spec, pods))}
    for mesh in spec.meshes:
        if mesh.way == "statefulset":
            name = names.mesh(mesh.name)
        elif mesh.way == "monarchmesh":
            name = manifests.monarch_mesh_name(spec.name, mesh.name)
        else:
            continue
        found[f"statefulset {name}"] = mesh.replicas - len(_mesh_pods(mesh, pods))
    return found


def _no_operator(spec: JobSpec, pods: Sequence[Object]) -> Iterator[Problem]:
    for mesh in spec.meshes:
        if mesh.way == "monarchmesh" and not _mesh_pods(mesh, pods):
            name = manifests.monarch_mesh_name(spec.name, mesh.name)
            told = "no pod has been made for it: is the MonarchMesh operator running?"
            yield Problem(f"monarchmesh {name}", "NoPods", told, 60.0)
        if mesh.way == "selector" and not _mesh_pods(mesh, pods):
            yield Problem(f"mesh {mesh.name}", "NoPods", f"no pod matches the selector {mesh.selector!r}", 10.0)


def _not_ready(spec: JobSpec, seen: Observer, waiting_for: Sequence[str]) -> list[str]:
    """What to name: the pods by name, and how many there are not."""
    pods, told = seen.objects("Pod"), []
    if "gateway" in waiting_for:
        told.append("the gateway")
    for mesh in spec.meshes:
        if mesh.name in waiting_for:
            hosts = ranked(mesh, _mesh_pods(mesh, pods))
            late = [pod["metadata"]["name"] for pod in hosts.values() if stage(pod) is not Stage.READY]
            absent = mesh.replicas - len(hosts)
            told += [*late, *([f"{absent} pods of mesh {mesh.name} that do not exist yet"] if absent > 0 else [])]
    return told
