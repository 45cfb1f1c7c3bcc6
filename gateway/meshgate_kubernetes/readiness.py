"""Waits until a job is up: says what it waits for, and stops as soon as waiting on is hopeless.

``waiting`` judges what is wrong at one moment; here is how long it has been, what the user is told of it, and
the last lines of a container that crashed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from meshgate_kubernetes import manifests
from meshgate_kubernetes.api import Api
from meshgate_kubernetes.capacity import Cluster
from meshgate_kubernetes.discovery import ranked
from meshgate_kubernetes.errors import KubernetesError, NotFound
from meshgate_kubernetes.names import COMPONENT_LABEL, Names
from meshgate_kubernetes.observe import Observer, Source
from meshgate_kubernetes.spec import JobSpec, Object
from meshgate_kubernetes.waiting import Problem, Stage, diagnose, stage

__all__ = ["JobNotReady", "Listener", "MeshProgress", "Progress", "wait_ready"]

HEARTBEAT = 5.0
_LOG_LINES = 20
OPERATOR_PATIENCE = 60.0
SELECTOR_PATIENCE = 15.0


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
    """Told what happens while a job comes up. Called on the thread that waits; what it raises ends the waiting."""

    def created(self, obj: Object) -> None:
        """The API server has taken an object, or has it."""

    def progress(self, progress: Progress) -> None:
        """The pods or their problems have changed, or ``HEARTBEAT`` seconds have passed without."""


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

    def with_note(self, note: str) -> JobNotReady:
        """The same with a last line."""
        self.args = (f"{self}\n{note}",)
        return self


def wait_ready(api: Api, spec: JobSpec, uid: str, listener: Listener, timeout: float | None) -> None:
    """Returns when the gateway and every mesh of the job whose parent is ``uid`` are ready.

    Raises JobNotReady as soon as that is hopeless, and NotFound when somebody ends the job meanwhile.
    """
    started = time.monotonic()
    job = Names(spec.name).selector()
    sources = [Source("ConfigMap", job), Source("Event", optional=True), Source("Pod", _gateway_selector(spec))]
    sources += [Source("Pod", mesh.selector) for mesh in spec.meshes]
    with Observer(api, spec.namespace, sources) as seen:
        waiter = _Waiter(api, spec, seen)
        version = -1
        while True:
            left = HEARTBEAT if timeout is None else min(HEARTBEAT, started + timeout - time.monotonic())
            version = seen.wait(version, waiter.patience_left(left))
            if seen.listed and not any(_is(uid, parent) for parent in seen.objects("ConfigMap")):
                raise NotFound(
                    f"job {spec.name!r} was ended while it came up: by another program, or by its own idle timeout of "
                    f"{spec.idle_timeout} s. Apply it again"
                )
            progress = waiter.look()
            listener.progress(progress)
            if all(mesh.ready for mesh in progress.meshes):
                return
            hopeless = waiter.hopeless()
            late = timeout is not None and time.monotonic() - started >= timeout
            if hopeless or late:
                raise waiter.failure(hopeless, None if hopeless else timeout)


def _is(uid: str, parent: Object) -> bool:
    return parent["metadata"]["uid"] == uid and "deletionTimestamp" not in parent["metadata"]


@dataclass(frozen=True, slots=True)
class _Picture:
    """The pods of a job at one moment: the gateway's, and each mesh's by rank."""

    gateway: Sequence[Object]
    meshes: Mapping[str, Mapping[int, Object]]

    @property
    def pods(self) -> list[Object]:
        return [*self.gateway, *(pod for pods in self.meshes.values() for pod in pods.values())]


class _Waiter:
    """What is wrong, and for how long it has been."""

    def __init__(self, api: Api, spec: JobSpec, seen: Observer) -> None:
        self._api = api
        self._spec = spec
        self._seen = seen
        self._since: dict[tuple[str, str], float] = {}  # by subject and kind of reason
        self._picture = _Picture((), {})
        self._problems: list[Problem] = []
        self._cluster: Cluster | None = None
        self._asked_cluster = False

    def look(self) -> Progress:
        self._picture = self._take_picture()
        events = self._events()
        self._problems = self._diagnose(events)
        if not self._asked_cluster and any(each.reason == "Unschedulable" for each in self._problems):
            self._asked_cluster = True
            self._cluster = _read_cluster(self._api)
            self._problems = self._diagnose(events)
        now = time.monotonic()
        present = {each.key for each in self._problems}
        self._since = {key: self._since.get(key, now) for key in present}
        return Progress(
            meshes=tuple(_stages(self._spec, self._picture, events)),
            problems=tuple(self._problems),
            trouble="" if self._seen.trouble is None else str(self._seen.trouble),
        )

    def hopeless(self) -> list[Problem]:
        now = time.monotonic()
        return [
            each
            for each in self._problems
            if each.patience is not None and now - self._since[each.key] >= each.patience
        ]

    def patience_left(self, at_most: float) -> float:
        """Seconds until a problem becomes hopeless if nothing changes."""
        now = time.monotonic()
        ends = [self._since[each.key] + each.patience - now for each in self._problems if each.patience is not None]
        return max(0.0, min([*ends, at_most]))

    def failure(self, hopeless: Sequence[Problem], timeout: float | None) -> JobNotReady:
        problems = [self._with_log(each) for each in hopeless or self._problems]
        return JobNotReady(self._spec.name, problems, _not_ready(self._spec, self._picture), timeout)

    def _take_picture(self) -> _Picture:
        gateway = self._seen.objects("Pod", _gateway_selector(self._spec))
        return _Picture(
            gateway=[pod for pod in gateway if "deletionTimestamp" not in pod["metadata"]],
            meshes={mesh.name: ranked(mesh, self._seen.objects("Pod", mesh.selector)) for mesh in self._spec.meshes},
        )

    def _diagnose(self, events: Sequence[Object]) -> list[Problem]:
        if not self._seen.listed:  # nobody knows yet what is there
            return []
        missing = _missing(self._spec, self._picture)
        found = diagnose(self._picture.pods, events, missing=missing, cluster=self._cluster)
        return [*found, *_nobody_there(self._spec, self._picture)]

    def _with_log(self, problem: Problem) -> Problem:
        of = problem.log_of
        if of is None:
            return problem
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


def _gateway_selector(spec: JobSpec) -> str:
    return f"{Names(spec.name).selector()},{COMPONENT_LABEL}=gateway"


def _stages(spec: JobSpec, picture: _Picture, events: Sequence[Object]) -> Iterator[MeshProgress]:
    yield _progress_of("gateway", 1, picture.gateway, events)
    for mesh in spec.meshes:
        pods = list(picture.meshes[mesh.name].values())
        yield _progress_of(mesh.name, mesh.replicas or max(1, len(pods)), pods, events)


def _progress_of(name: str, wanted: int, pods: Sequence[Object], events: Sequence[Object]) -> MeshProgress:
    counts: dict[Stage, int] = {}
    for pod in pods:
        at = stage(pod, events)
        counts[at] = counts.get(at, 0) + 1
    if (absent := wanted - len(pods)) > 0:
        counts[Stage.PENDING] = counts.get(Stage.PENDING, 0) + absent
    return MeshProgress(name, wanted, tuple((at, counts[at]) for at in Stage if at in counts))


def _missing(spec: JobSpec, picture: _Picture) -> dict[str, int]:
    """How many pods each controller of the job has yet to make."""
    names = Names(spec.name)
    found = {f"replicaset {names.gateway}": 1 - len(picture.gateway)}
    for mesh in spec.meshes:
        if mesh.way == "selector":
            continue
        monarch = mesh.way == "monarchmesh"
        name = manifests.monarch_mesh_name(spec.name, mesh.name) if monarch else names.mesh(mesh.name)
        found[f"statefulset {name}"] = mesh.replicas - len(picture.meshes[mesh.name])
    return found


def _nobody_there(spec: JobSpec, picture: _Picture) -> Iterator[Problem]:
    for mesh in spec.meshes:
        if picture.meshes[mesh.name]:
            continue
        if mesh.way == "monarchmesh":
            name = manifests.monarch_mesh_name(spec.name, mesh.name)
            told = "no pod has been made for it: is the MonarchMesh operator running?"
            yield Problem(f"monarchmesh {name}", "NoPods", told, OPERATOR_PATIENCE)
        elif mesh.way == "selector":
            told = f"no pod with a rank matches the selector {mesh.selector!r}"
            yield Problem(f"mesh {mesh.name}", "NoPods", told, SELECTOR_PATIENCE)


def _not_ready(spec: JobSpec, picture: _Picture) -> list[str]:
    """Pods by name, and how many there are not."""
    told = [] if any(stage(pod) is Stage.READY for pod in picture.gateway) else ["the gateway"]
    for mesh in spec.meshes:
        pods = picture.meshes[mesh.name]
        told += [pod["metadata"]["name"] for pod in pods.values() if stage(pod) is not Stage.READY]
        if (absent := max(mesh.replicas, 1) - len(pods)) > 0:
            told.append(f"{absent} of mesh {mesh.name!r} that do not exist yet")
    return told
