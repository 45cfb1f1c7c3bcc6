"""Why pods are not ready, what an unschedulable one lacks, and whether waiting helps. Pure: objects in, problems out.

The timeout of a problem is how long it may last before waiting is pointless. None: no limit, because the cluster may
resolve it (a busy node, a slow disk). 0: none at all, because only a person can resolve it. Values in between are for
problems that look the same whether they pass or not, such as a failed image pull, or a GPU that no node has until an
autoscaler adds one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Literal

from pydantic import Field

from meshgate_kubernetes.manifests.pods import INSTALL_CONTAINER
from meshgate_kubernetes.manifests.spec import Object, format_quantity, parse_quantity
from meshgate_kubernetes.status.discovery import is_ready
from meshgate_kubernetes.status.placement import mismatches

AUTOSCALER_TIMEOUT = 15.0
"""Cluster autoscalers check pending pods every ten seconds and report it in an event."""
PULL_TIMEOUT = 20.0
MOUNT_TIMEOUT = 60.0
SHORT_TIMEOUT = 10.0
STARTUP_TIME = 10.0
"""Seconds for which a failing readiness probe of a new container is not a problem."""

_PULL_REASONS = frozenset({"ErrImagePull", "ImagePullBackOff", "RegistryUnavailable"})
_NO_PULL_REASONS = frozenset({"InvalidImageName", "ErrImageNeverPull", "ErrImageNeverPullBackOff"})
_DEFINITE_PULL = re.compile(
    r"not found|manifest unknown|unauthorized|denied|does not exist|no such host|authentication required", re.I
)
_WRONG_FORMAT = "exec format error"
_ARCHITECTURE_HINT = (
    ". The image is for another architecture than the node: build it with --platform=linux/amd64 (or linux/arm64), or "
    "choose nodes by node_selector={'kubernetes.io/arch': …}"
)
_QUOTA = re.compile(
    r"exceeded quota: (?P<quota>[^,]+), requested: (?P<requested>.+?), used: (?P<used>.+?), limited: (?P<limited>.+)"
)
_LIMIT_RANGE = re.compile(r"(maximum|minimum|ratio).* per (Container|Pod) is|must be less than or equal to \w+ limit")
_INSUFFICIENT = re.compile(r"Insufficient ([\w./-]+?)(?=[,.;]?(?:\s|$))")


@dataclass(frozen=True, slots=True)
class Cluster:
    """The nodes, and the pods of all namespaces (empty if listing them is forbidden)."""

    nodes: Sequence[Object]
    pods: Sequence[Object] = ()
    known_shortages: dict[tuple[str, str], list[Shortage]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """By the scheduler's message and the pod's resources, which a thousand pods have in common."""
    known_mismatches: dict[tuple[str, str], list[str]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def most(self, resource: str) -> tuple[Decimal, Decimal]:
        """The most that a node has of ``resource``, in total and free."""
        total = {node["metadata"]["name"]: _allocatable(node, resource) for node in self.nodes}
        free = dict(total)
        for pod in self.pods:
            node = pod["spec"].get("nodeName")
            if node in free and pod.get("status", {}).get("phase") not in ("Succeeded", "Failed"):
                free[node] -= requests(pod).get(resource, Decimal(0))
        return max(total.values(), default=Decimal(0)), max([*free.values(), Decimal(0)])


@dataclass(frozen=True, slots=True)
class Shortage:
    """A pod requests more of ``resource`` than any node has free (``most_free``) or in total (``largest``)."""

    resource: str
    requested: Decimal
    largest: Decimal
    most_free: Decimal

    @property
    def impossible(self) -> bool:
        """Whether not even an empty node could run the pod."""
        return self.requested > self.largest

    def __str__(self) -> str:
        requested, largest = (
            format_quantity(self.requested, self.resource),
            format_quantity(self.largest, self.resource),
        )
        if self.impossible:
            missing = format_quantity(self.requested - self.largest, self.resource)
            return (
                f"Insufficient {self.resource}: the pod requests {requested}, the largest node has {largest} "
                f"({missing} short)"
            )
        free = format_quantity(self.most_free, self.resource)
        missing = format_quantity(self.requested - self.most_free, self.resource)
        return (
            f"Insufficient {self.resource}: the pod requests {requested}, no node has more than {free} free "
            f"({missing} short)"
        )


def shortages(pod: Object, cluster: Cluster | None, scheduler_message: str) -> list[Shortage]:
    """The resources that the scheduler's message calls insufficient, with amounts."""
    if cluster is None:
        return []
    containers = [pod["spec"].get(key) or [] for key in ("containers", "initContainers")]
    key = scheduler_message, repr([[each.get("resources") for each in group] for group in containers])
    if key not in cluster.known_shortages:
        cluster.known_shortages[key] = shortages_of(pod, cluster, _INSUFFICIENT.findall(scheduler_message))
    return cluster.known_shortages[key]


def shortages_of(pod: Object, cluster: Cluster, resources: Iterable[str]) -> list[Shortage]:
    """Those of ``resources`` of which the pod requests more than any node has."""
    requested = requests(pod)
    found = []
    for resource in dict.fromkeys(resources):
        if resource not in requested:
            continue
        largest, most_free = cluster.most(resource)
        if requested[resource] > most_free:
            found.append(Shortage(resource, requested[resource], largest, most_free))
    return found


def requests(pod: Object, what: Literal["requests", "limits"] = "requests") -> dict[str, Decimal]:
    """The requests that the scheduler counts: the sum of the containers, or the largest init container if larger."""
    total: dict[str, Decimal] = {}
    for container in pod["spec"].get("containers") or []:
        for resource, amount in _amounts(container, what).items():
            total[resource] = total.get(resource, Decimal(0)) + amount
    for container in pod["spec"].get("initContainers") or []:
        for resource, amount in _amounts(container, what).items():
            total[resource] = max(total.get(resource, Decimal(0)), amount)
    return total


def _amounts(container: Object, what: str) -> dict[str, Decimal]:
    amounts = (container.get("resources") or {}).get(what) or {}
    return {resource: parse_quantity(amount) for resource, amount in amounts.items()}


def quota_shortages(quota: Object, pods: Sequence[Object]) -> Iterator[str]:
    """What ``pods`` need of a ResourceQuota beyond what it has left. One with scopes counts only some pods: nothing."""
    if quota["spec"].get("scopes") or quota["spec"].get("scopeSelector"):
        return
    needed: dict[str, Decimal] = {"pods": Decimal(len(pods)), "count/pods": Decimal(len(pods))}
    for what in ("requests", "limits"):
        for pod in pods:
            for resource, amount in requests(pod, what).items():
                for key in (f"{what}.{resource}", *([resource] if what == "requests" else [])):
                    needed[key] = needed.get(key, Decimal(0)) + amount
    status = quota.get("status") or {}
    for key, hard in (status.get("hard") or quota["spec"].get("hard") or {}).items():
        left = parse_quantity(hard) - parse_quantity((status.get("used") or {}).get(key, "0"))
        if (need := needed.get(key, Decimal(0))) > left:
            resource = key.removeprefix("requests.").removeprefix("limits.")
            rest = format_quantity(max(left, Decimal(0)), resource)
            asked = format_quantity(need, resource)
            yield f"quota {quota['metadata']['name']} has {rest} of {key} left, and the job needs {asked}"


def _allocatable(node: Object, resource: str) -> Decimal:
    return parse_quantity(node.get("status", {}).get("allocatable", {}).get(resource, "0"))


class Stage(Enum):
    """The stages of a starting pod."""

    PENDING = "pending"
    PULLING = "pulling"
    STARTING = "starting"
    RUNNING = "running"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class ContainerLog:
    """The container whose last output explains a problem."""

    pod: str
    container: str
    previous: bool


@dataclass(frozen=True, slots=True)
class Problem:
    """Why ``subject`` (``pod trainer-workers-0``) is not ready. ``timeout``: see the module."""

    subject: str
    reason: str
    message: str
    timeout: Annotated[float | None, Field(alias="patience")] = None
    log_of: ContainerLog | None = None
    log: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Identifies a lasting problem, although Kubernetes alternates between reasons for a failing pull."""
        return self.subject, "pull" if self.about_image else self.reason

    @property
    def about_image(self) -> bool:
        return self.reason in _PULL_REASONS | _NO_PULL_REASONS

    def with_log(self, log: str) -> Problem:
        return replace(self, log=log, message=self.message + (_ARCHITECTURE_HINT if _WRONG_FORMAT in log else ""))

    def __str__(self) -> str:
        text = f"{self.subject}: {self.reason}: {self.message}" if self.message else f"{self.subject}: {self.reason}"
        if not self.log.strip():
            return text
        return "\n".join([f"{text}. Its last output:", *(f"    {line}" for line in self.log.strip().splitlines())])


def group_problems(problems: Sequence[Problem]) -> list[Problem]:
    """``problems`` with those that differ only in their pod as one: nine pods that lack the same node are one line."""
    groups: dict[tuple[str, str, str], list[Problem]] = {}
    for each in problems:
        subject = "pod" if each.subject.startswith("pod ") else each.subject
        groups.setdefault((subject, each.key[1], each.message), []).append(each)
    return [_as_one(group) for group in groups.values()]


def _as_one(group: Sequence[Problem]) -> Problem:
    if len(group) == 1:
        return group[0]
    names = [each.subject.partition(" ")[2] for each in group]
    shown = ", ".join(names[:2]) + (", …" if len(names) > 2 else "")
    return replace(group[0], subject=f"{len(names)} pods ({shown})")


@dataclass(frozen=True, slots=True)
class ExaminedPod:
    """A pod with the events about it, and what they mean. Only a starting pod has problems."""

    pod: Object
    events: Sequence[Object]
    stage: Stage
    problems: tuple[Problem, ...]


def examine_pod(pod: Object, events: Sequence[Object] = (), cluster: Cluster | None = None) -> ExaminedPod:
    """``events``: about this pod, oldest first. ``cluster``: the resources of the nodes, if the user may read them."""
    starting = not is_ready(pod) and "deletionTimestamp" not in pod["metadata"]
    problems = tuple(_pod_problems(pod, events, cluster)) if starting else ()
    return ExaminedPod(pod, events, _pod_stage(pod, events), problems)


def _pod_stage(pod: Object, events: Sequence[Object]) -> Stage:
    if is_ready(pod):
        return Stage.READY
    status = pod.get("status", {})
    if status.get("phase") == "Running":
        return Stage.RUNNING
    if not any(each["type"] == "PodScheduled" and each["status"] == "True" for each in status.get("conditions") or []):
        return Stage.PENDING
    latest = [event["reason"] for event in events if event["reason"] in ("Pulling", "Pulled", "Failed")]
    return Stage.PULLING if latest and latest[-1] == "Pulling" else Stage.STARTING


def _pod_problems(pod: Object, events: Sequence[Object], cluster: Cluster | None) -> Iterator[Problem]:
    status = pod.get("status", {})
    subject = f"pod {pod['metadata']['name']}"
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            yield _unschedulable(pod, subject, condition, events, cluster)
            return
    if status.get("phase") == "Failed":
        message = status.get("message") or "the pod has ended"
        yield Problem(subject, status.get("reason") or "Failed", message, SHORT_TIMEOUT)
        return
    initial = [each for each in status.get("initContainerStatuses") or [] if not _has_succeeded(each)]
    containers = [*initial, *(status.get("containerStatuses") or [])]
    problems = [problem for each in containers if (problem := _container_problem(pod, subject, each, events))]
    yield from problems
    if not problems and events and _failed_mount(events[-1]):
        yield Problem(subject, events[-1]["reason"], events[-1].get("message", ""), MOUNT_TIMEOUT)
    elif not problems:
        yield from _not_ready(pod, subject, events)


def _has_succeeded(status: Object) -> bool:
    """Whether an init container has done its work."""
    return bool(status.get("state", {}).get("terminated", {}).get("exitCode") == 0)


def _failed_mount(event: Object) -> bool:
    """Whether a mount has failed. Kubelets report caches that they have yet to fill as failures too, and retry."""
    transient = re.search(r"failed to sync (secret|configmap) cache", event.get("message", ""))
    return event["reason"] in ("FailedMount", "FailedAttachVolume") and not transient


def _not_ready(pod: Object, subject: str, events: Sequence[Object]) -> Iterator[Problem]:
    """The problem of a running pod whose readiness probe fails after its program has had time to start."""
    unhealthy = [event for event in events if event["reason"] == "Unhealthy"]
    for status in pod.get("status", {}).get("containerStatuses") or []:
        started = (status.get("state", {}).get("running") or {}).get("startedAt")
        if status.get("ready") or started is None or not unhealthy:
            continue
        if _event_time(unhealthy[-1]) - _timestamp(started) < STARTUP_TIME:
            continue
        log_of = ContainerLog(pod["metadata"]["name"], status["name"], previous=False)
        yield Problem(subject, "NotReady", unhealthy[-1].get("message", ""), None, log_of)


def _event_time(event: Object) -> float:
    return _timestamp(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"]["creationTimestamp"])


def _timestamp(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def _unschedulable(
    pod: Object, subject: str, condition: Object, events: Sequence[Object], cluster: Cluster | None
) -> Problem:
    message = condition.get("message", "").strip()
    reasons = {event["reason"] for event in events}
    if condition.get("reason") == "SchedulingGated":
        return Problem(subject, "SchedulingGated", "the pod waits for its queue to admit it")
    if "TriggeredScaleUp" in reasons:
        return Problem(subject, "Unschedulable", f"{message} The autoscaler is adding a node.")
    if "persistentvolumeclaim" in message and "not found" in message:
        return Problem(subject, "Unschedulable", message, SHORT_TIMEOUT)
    missing = shortages(pod, cluster, message)
    impossible = any(each.impossible for each in missing) or (
        cluster is not None and "Insufficient" not in message and ("didn't match" in message or "had taint" in message)
    )
    text = ". ".join([*(str(each) for each in missing), *_mismatches(pod, cluster, message), message])
    return Problem(subject, "Unschedulable", text, AUTOSCALER_TIMEOUT if impossible else None)


def _mismatches(pod: Object, cluster: Cluster | None, message: str) -> list[str]:
    """What the pod requires of its node and no node has."""
    if cluster is None:
        return []
    key = message, repr([pod["spec"].get(field) for field in ("nodeSelector", "affinity", "tolerations")])
    if key not in cluster.known_mismatches:
        cluster.known_mismatches[key] = list(mismatches(pod, cluster.nodes, message))
    return cluster.known_mismatches[key]


def _container_problem(pod: Object, subject: str, status: Object, events: Sequence[Object]) -> Problem | None:
    waiting = status.get("state", {}).get("waiting") or {}
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    if reason in _PULL_REASONS:
        pulls = [event for event in events if event["reason"] == "Failed" and "pull image" in event.get("message", "")]
        if reason == "ErrImagePull" and (image := status.get("image")):  # as the event, which is later
            message = f'Failed to pull image "{image}": {message}'
        text = pulls[-1]["message"] if pulls else message
        definite = _DEFINITE_PULL.search(text) is not None
        hint = _image_hint(pod, status["name"]) if definite else ""
        return Problem(subject, reason, text + hint, 0 if definite else PULL_TIMEOUT)
    if reason in _NO_PULL_REASONS:
        return Problem(subject, reason, message + _image_hint(pod, status["name"]), 0)
    if reason in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError"):
        return Problem(subject, reason, message, SHORT_TIMEOUT)
    return _crash(pod, subject, status, reason)


def _image_hint(pod: Object, container: str) -> str:
    """Where the image of one of meshgate's containers is set."""
    if container == INSTALL_CONTAINER:  # it has the image of the other, and pulls it first
        container = pod["spec"]["containers"][0]["name"]
    places = {
        "worker": "$MESHGATE_WORKER_IMAGE or Compute(image=…)",
        "gateway": "$MESHGATE_GATEWAY_IMAGE or gateway=Compute(image=…)",
    }
    return f". Set {places[container]} to an image that the cluster can pull" if container in places else ""


def _crash(pod: Object, subject: str, status: Object, waiting: str) -> Problem | None:
    """The problem of a container that has ended and is not running again."""
    current = status.get("state", {}).get("terminated")
    ended = current or (status.get("lastState") or {}).get("terminated")
    if not ended or (waiting != "CrashLoopBackOff" and current is None):
        return None
    restarts = status.get("restartCount", 0)
    cause = f"exit code {ended.get('exitCode')}"
    if ended.get("signal"):
        cause = f"signal {ended['signal']}"
    if ended.get("message"):
        cause += f", {ended['message'].strip()}"
    oom = ended.get("reason") == "OOMKilled"
    message = f"container {status['name']} ended with {cause}" + (f", {restarts + 1} times" if restarts else "")
    if oom:
        message += _memory_limit(pod, status["name"])
    return Problem(
        subject,
        "OOMKilled" if oom else waiting or "Crashed",
        message,
        0 if waiting == "CrashLoopBackOff" or restarts > 1 else None,
        ContainerLog(pod["metadata"]["name"], status["name"], previous=current is None),
    )


def _memory_limit(pod: Object, container: str) -> str:
    for each in pod["spec"]["containers"]:
        limit = (each.get("resources") or {}).get("limits", {}).get("memory")
        if each["name"] == container and limit:
            return f"; it exceeded its memory limit of {limit}: raise the limit"
    return ""


def controller_problems(events: Sequence[Object], missing: Mapping[str, int]) -> Iterator[Problem]:
    """The problems of controllers that cannot create their pods.

    ``events``: since the job was created, oldest first. ``missing``: how many pods each controller (``statefulset
    trainer-workers``) has yet to create; the events of one without missing pods are ignored.
    """
    latest: dict[str, str] = {}
    for event in events:
        involved = event["involvedObject"]
        if event["reason"] == "FailedCreate":
            latest[f"{involved['kind'].lower()} {involved['name']}"] = event.get("message", "")
    for subject, message in latest.items():
        owner = next((name for name in missing if subject == name or subject.startswith(f"{name}-")), None)
        if owner is not None and missing[owner] > 0:
            yield failed_create(subject, message)


def failed_create(subject: str, message: str) -> Problem:
    """The problem of a pod that the API server rejected. Controllers report ``create Pod … failed error: reason``."""
    reason = re.sub(r"^(create Pod \S+ in \S+ \S+ failed error: |Error creating: )", "", message)
    if quota := _QUOTA.search(reason):
        text = "quota {quota} is exceeded: a pod requests {requested}; {used} of {limited} is in use".format(
            **quota.groupdict()
        )
        return Problem(subject, "QuotaExceeded", text, 0)
    if "failed quota" in reason:
        return Problem(subject, "QuotaExceeded", reason + _resources_hint(subject, reason), 0)
    if "failed calling webhook" in reason or "error looking up service account" in reason:
        return Problem(subject, "FailedCreate", reason, PULL_TIMEOUT)
    definite = any(word in reason for word in ("forbidden", "denied", "is invalid"))
    hint = _resources_hint(subject, reason) if _LIMIT_RANGE.search(reason) else ""
    return Problem(subject, "FailedCreate", reason + hint, 0 if definite else SHORT_TIMEOUT)


def _resources_hint(subject: str, reason: str) -> str:
    """Which arguments set the resources that a quota or a limit range rejects. Only the gateway has a Deployment."""
    arguments = {"cpu": "cpus=…", "memory": "memory=…", "ephemeral-storage": "disk_size=…"}
    named = ", ".join(text for resource, text in arguments.items() if resource in reason)
    if not named:
        return ""
    owner = "gateway=Compute" if subject.startswith(("deployment", "replicaset")) else "Compute"
    return f". Set {owner}({named})"
