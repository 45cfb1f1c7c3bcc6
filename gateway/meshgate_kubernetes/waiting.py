"""Why pods are not up, and whether they ever will be. Pure: what the API said in, problems out.

A problem carries a *patience*: how long it may last before waiting on is hopeless. None: for ever, because the
cluster may mend it by itself (a busy node, a slow disk). 0: at once, because only a person can mend it. What
lies between are problems that look alike whether they pass or not, such as a registry that refuses the first
pull, or a GPU that no node has until an autoscaler brings one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum

from meshgate_kubernetes.capacity import Cluster, shortages
from meshgate_kubernetes.discovery import is_ready
from meshgate_kubernetes.spec import Object

__all__ = ["LogOf", "Problem", "Stage", "diagnose", "stage"]

AUTOSCALER_PATIENCE = 15.0
"""Cluster autoscalers look at pending pods every ten seconds and say so in an event."""
PULL_PATIENCE = 20.0
MOUNT_PATIENCE = 60.0
SOON = 10.0
START_UP = 10.0
"""Seconds in which a container that is not ready yet is no news."""

_PULL_REASONS = frozenset({"ErrImagePull", "ImagePullBackOff", "RegistryUnavailable"})
_DEFINITE_PULL = re.compile(
    r"not found|manifest unknown|unauthorized|denied|does not exist|no such host|authentication required", re.I
)
_QUOTA = re.compile(
    r"exceeded quota: (?P<quota>[^,]+), requested: (?P<requested>.+?), used: (?P<used>.+?), limited: (?P<limited>.+)"
)


class Stage(Enum):
    """Where a pod is on its way up."""

    PENDING = "pending"
    PULLING = "pulling"
    STARTING = "starting"
    RUNNING = "running"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class LogOf:
    """The container whose last lines explain a problem."""

    pod: str
    container: str
    previous: bool


@dataclass(frozen=True, slots=True)
class Problem:
    """Why ``subject`` (``pod trainer-workers-0``) is not up."""

    subject: str
    reason: str
    message: str
    patience: float | None = None
    log_of: LogOf | None = None
    log: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """The same for a problem that goes on, whichever word for it is the present one."""
        return self.subject, "pull" if self.reason in _PULL_REASONS else self.reason

    def with_log(self, log: str) -> Problem:
        return replace(self, log=log)

    def __str__(self) -> str:
        told = f"{self.subject}: {self.reason}: {self.message}" if self.message else f"{self.subject}: {self.reason}"
        if not self.log.strip():
            return told
        return "\n".join([f"{told}. Its last output:", *(f"    {line}" for line in self.log.strip().splitlines())])


def stage(pod: Object, events: Iterable[Object] = ()) -> Stage:
    if is_ready(pod):
        return Stage.READY
    status = pod.get("status", {})
    if status.get("phase") == "Running":
        return Stage.RUNNING
    if not any(each["type"] == "PodScheduled" and each["status"] == "True" for each in status.get("conditions") or []):
        return Stage.PENDING
    latest = [event["reason"] for event in _of_pod(pod, events) if event["reason"] in ("Pulling", "Pulled", "Failed")]
    return Stage.PULLING if latest and latest[-1] == "Pulling" else Stage.STARTING


def diagnose(
    pods: Sequence[Object],
    events: Sequence[Object],
    *,
    missing: Mapping[str, int],
    cluster: Cluster | None = None,
) -> list[Problem]:
    """The problems of pods that are not ready, and of the controllers that cannot make theirs.

    ``events`` are those of these pods and of their controllers since the job was made, oldest first. ``missing``
    says how many pods a controller (``statefulset trainer-workers``) has yet to make; what the events of a
    controller say counts only while it misses some. ``cluster``, where it may be read, says what nodes have.
    """
    found: list[Problem] = []
    for pod in pods:
        if not is_ready(pod) and "deletionTimestamp" not in pod["metadata"]:
            found.extend(_pod_problems(pod, _of_pod(pod, events), cluster))
    found.extend(_controller_problems(events, missing))
    return found


def _pod_problems(pod: Object, events: list[Object], cluster: Cluster | None) -> Iterator[Problem]:
    status = pod.get("status", {})
    subject = f"pod {pod['metadata']['name']}"
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            yield _unschedulable(pod, subject, condition, events, cluster)
            return
    if status.get("phase") == "Failed":
        message = status.get("message") or "it has ended"
        yield Problem(subject, status.get("reason") or "Failed", message, SOON)
        return
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    problems = [problem for each in containers if (problem := _container_problem(pod, subject, each, events))]
    yield from problems
    if not problems and events and events[-1]["reason"] in ("FailedMount", "FailedAttachVolume"):
        yield Problem(subject, events[-1]["reason"], events[-1].get("message", ""), MOUNT_PATIENCE)
    elif not problems:
        yield from _not_ready(pod, subject, events)


def _not_ready(pod: Object, subject: str, events: list[Object]) -> Iterator[Problem]:
    """A pod that runs, and whose readiness probe still fails when a program has had time to start."""
    said = [event for event in events if event["reason"] == "Unhealthy"]
    for status in pod.get("status", {}).get("containerStatuses") or []:
        began = (status.get("state", {}).get("running") or {}).get("startedAt")
        if status.get("ready") or began is None or not said or _seconds(said[-1]) - _time(began) < START_UP:
            continue
        log_of = LogOf(pod["metadata"]["name"], status["name"], previous=False)
        yield Problem(subject, "NotReady", said[-1].get("message", ""), None, log_of)


def _seconds(event: Object) -> float:
    return _time(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"]["creationTimestamp"])


def _time(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def _unschedulable(
    pod: Object, subject: str, condition: Object, events: list[Object], cluster: Cluster | None
) -> Problem:
    said = condition.get("message", "").strip()
    reasons = {event["reason"] for event in events}
    if condition.get("reason") == "SchedulingGated":
        return Problem(subject, "SchedulingGated", "it waits for its queue to admit it")
    if "TriggeredScaleUp" in reasons:
        return Problem(subject, "Unschedulable", f"{said} The autoscaler is adding a node for it.")
    if "persistentvolumeclaim" in said and "not found" in said:
        return Problem(subject, "Unschedulable", said, SOON)
    short = shortages(pod, cluster, said)
    message = ". ".join([*(str(each) for each in short), said])
    impossible = any(each.impossible for each in short) or (
        cluster is not None and "Insufficient" not in said and ("didn't match" in said or "had taint" in said)
    )
    return Problem(subject, "Unschedulable", message, AUTOSCALER_PATIENCE if impossible else None)


def _container_problem(pod: Object, subject: str, status: Object, events: list[Object]) -> Problem | None:
    waiting = status.get("state", {}).get("waiting") or {}
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    if reason in _PULL_REASONS:
        pulls = [event for event in events if event["reason"] == "Failed" and "pull image" in event.get("message", "")]
        said = pulls[-1]["message"] if pulls else message
        return Problem(subject, reason, said, 0 if _DEFINITE_PULL.search(said) else PULL_PATIENCE)
    if reason in ("InvalidImageName", "ErrImageNeverPull", "ErrImageNeverPullBackOff"):
        return Problem(subject, reason, message, 0)
    if reason in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError"):
        return Problem(subject, reason, message, SOON)
    return _crash(pod, subject, status, reason)


def _crash(pod: Object, subject: str, status: Object, waiting: str) -> Problem | None:
    """The last end of a container that has ended and not come back to stay."""
    now = status.get("state", {}).get("terminated")
    ended = now or (status.get("lastState") or {}).get("terminated")
    if not ended or (waiting != "CrashLoopBackOff" and now is None):
        return None
    restarts = status.get("restartCount", 0)
    how = f"exit code {ended.get('exitCode')}"
    if ended.get("signal"):
        how = f"signal {ended['signal']}"
    if ended.get("message"):
        how += f", {ended['message'].strip()}"
    oom = ended.get("reason") == "OOMKilled"
    message = f"container {status['name']} ended with {how}, {restarts + 1} times"
    if oom:
        message += _memory_limit(pod, status["name"])
    return Problem(
        subject,
        "OOMKilled" if oom else waiting or "Crashed",
        message,
        0 if waiting == "CrashLoopBackOff" or restarts > 1 else None,
        LogOf(pod["metadata"]["name"], status["name"], previous=now is None),
    )


def _memory_limit(pod: Object, container: str) -> str:
    for each in pod["spec"]["containers"]:
        limit = (each.get("resources") or {}).get("limits", {}).get("memory")
        if each["name"] == container and limit:
            return f"; it needs more than its limit of {limit} of memory"
    return ""


def _controller_problems(events: Sequence[Object], missing: Mapping[str, int]) -> Iterator[Problem]:
    latest: dict[str, str] = {}
    for event in events:
        involved = event["involvedObject"]
        if event["reason"] == "FailedCreate":
            latest[f"{involved['kind'].lower()} {involved['name']}"] = event.get("message", "")
    for subject, said in latest.items():
        owner = next((name for name in missing if subject == name or subject.startswith(f"{name}-")), None)
        if owner is not None and missing[owner] > 0:
            yield _refused(subject, said)


def _refused(subject: str, said: str) -> Problem:
    """A pod that the API server would not take. A controller's words are ``create Pod … failed error: why``."""
    why = re.sub(r"^(create Pod \S+ in \S+ \S+ failed error: |Error creating: )", "", said)
    if quota := _QUOTA.search(why):
        message = "quota {quota} leaves no room: a pod asks for {requested}; in use: {used}, of {limited}".format(
            **quota.groupdict()
        )
        return Problem(subject, "QuotaExceeded", message, 0)
    if "failed quota" in why:
        return Problem(subject, "QuotaExceeded", why, 0)
    if "failed calling webhook" in why or "error looking up service account" in why:
        return Problem(subject, "FailedCreate", why, PULL_PATIENCE)
    definite = any(word in why for word in ("forbidden", "denied", "is invalid"))
    return Problem(subject, "FailedCreate", why, 0 if definite else SOON)


def _of_pod(pod: Object, events: Iterable[Object]) -> list[Object]:
    uid = pod["metadata"].get("uid")
    return [event for event in events if event["involvedObject"].get("uid") == uid]
