"""The problems of pods that are not ready, and their timeouts."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

import pytest

from meshgate_kubernetes.status.diagnosis import (
    Cluster,
    ContainerLog,
    Problem,
    Stage,
    controller_problems,
    examine_pod,
    group_problems,
    quota_shortages,
    requests,
    shortages,
)
from tests.clusters.kubernetes.objects import Object, event, node, pod, unschedulable, waiting

STATEFUL_SET: Object = {"kind": "StatefulSet", "metadata": {"name": "trainer-workers"}}
MESSAGE = "0/2 nodes are available: 2 Insufficient memory, 1 Insufficient cpu."


def the_problem(of: Object, *events: Object, cluster: Cluster | None = None) -> Problem:
    (problem,) = examine_pod(of, events, cluster).problems
    return problem


def test_a_ready_pod_has_no_problem_despite_earlier_events() -> None:
    assert not examine_pod(pod(), [event(pod(), "Failed", "Failed to pull image")]).problems


@pytest.mark.parametrize(("code", "problems"), [(0, []), (1, ["Crashed"])])
def test_an_init_container_that_has_succeeded_is_no_problem(code: int, problems: list[str]) -> None:
    starting = pod(ready=False)
    ended = {"name": "install", "restartCount": 0, "state": {"terminated": {"exitCode": code}}}
    starting["status"] |= {"phase": "Pending", "initContainerStatuses": [ended]}
    assert [each.reason for each in examine_pod(starting).problems] == problems


def test_a_pod_that_is_being_deleted_has_no_problem() -> None:
    terminating = waiting("CrashLoopBackOff")
    terminating["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert not examine_pod(terminating).problems


def test_a_resource_that_no_node_has_is_reported_with_amounts() -> None:
    pending = unschedulable("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.", **{"nvidia_com/gpu": "8"})
    problem = the_problem(pending, cluster=Cluster([node(**{"nvidia_com/gpu": "2"})]))
    assert problem.reason == "Unschedulable"
    assert problem.message.startswith(
        "Insufficient nvidia.com/gpu: the pod requests 8, the largest node has 2 (6 short). 0/1 nodes are available"
    )
    assert problem.timeout == 15.0


def test_a_resource_that_is_only_in_use_has_no_timeout() -> None:
    other = pod("other")
    other["spec"] |= {"nodeName": "node0", "containers": [{"resources": {"requests": {"memory": "3Gi"}}}]}
    pending = unschedulable("0/1 nodes are available: 1 Insufficient memory.", memory="2Gi")
    problem = the_problem(pending, cluster=Cluster([node(memory="4Gi")], [other]))
    assert "the pod requests 2Gi, no node has more than 1Gi free (1Gi short)" in problem.message
    assert problem.timeout is None


def test_a_pod_for_which_the_autoscaler_adds_a_node_has_no_timeout() -> None:
    pending = unschedulable("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.", **{"nvidia_com/gpu": "8"})
    problem = the_problem(pending, event(pending, "TriggeredScaleUp"), cluster=Cluster([node()]))
    assert problem.timeout is None
    assert "The autoscaler is adding a node" in problem.message


def test_without_access_to_nodes_the_message_is_the_schedulers() -> None:
    problem = the_problem(unschedulable("0/9 nodes are available: 9 Insufficient cpu.", cpu="64"))
    assert problem.message == "0/9 nodes are available: 9 Insufficient cpu."
    assert problem.timeout is None


def test_what_the_pod_requires_of_its_node_is_named_before_the_message_of_the_scheduler() -> None:
    pending = unschedulable("0/1 nodes are available: 1 node(s) didn't match node selector.")
    pending["spec"]["nodeSelector"] = {"gpu": "H100"}
    cluster = Cluster([node()])
    for _ in range(2):
        message = the_problem(pending, cluster=cluster).message
        assert message.startswith("No node has the label gpu=H100: no node has this label. 0/1 nodes are available")
    assert len(cluster.known_mismatches) == 1


def test_a_pod_that_its_queue_has_not_admitted_waits_as_long_as_that_takes() -> None:
    held = unschedulable("Scheduling is blocked due to non-empty scheduling gates")
    held["status"]["conditions"][0]["reason"] = "SchedulingGated"
    problem = the_problem(held, cluster=Cluster([node()]))
    assert str(problem) == "pod trainer-workers-0: SchedulingGated: the pod waits for its queue to admit it"
    assert problem.timeout is None


def test_a_selector_that_no_node_matches_has_the_autoscalers_timeout() -> None:
    message = "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity."
    assert the_problem(unschedulable(message), cluster=Cluster([node()])).timeout == 15.0


@pytest.mark.parametrize(
    ("message", "timeout"),
    [
        ('Failed to pull image "x": rpc error: manifest unknown', 0),
        ('Failed to pull image "x": not found', 0),
        ('Failed to pull image "x": unauthorized', 0),
        ('Failed to pull image "x": dial tcp: i/o timeout', 20.0),
    ],
)
def test_a_failed_pull_has_a_timeout_unless_it_is_definite(message: str, timeout: float) -> None:
    stuck = waiting("ImagePullBackOff", 'Back-off pulling image "x"')
    problem = the_problem(stuck, event(stuck, "Failed", message), event(stuck, "BackOff", "Back-off"))
    assert problem.message.startswith(message)
    assert ("Set $MESHGATE_WORKER_IMAGE or Compute(image=…)" in problem.message) is (timeout == 0)
    assert problem.timeout == timeout


def test_pods_that_cannot_pull_an_image_have_the_same_problem_before_and_after_the_event() -> None:
    stuck = waiting("ErrImagePull", "rpc error: i/o timeout", image="x")
    later = event(stuck, "Failed", 'Failed to pull image "x": rpc error: i/o timeout')
    assert the_problem(stuck) == the_problem(stuck, later)


@pytest.mark.parametrize("container", ["worker", "gateway"])
def test_the_image_that_an_installation_pulls_is_that_of_its_container(container: str) -> None:
    stuck = waiting("ErrImagePull", "not found")
    stuck["status"]["initContainerStatuses"] = [
        {**stuck["status"].pop("containerStatuses")[0], "name": "install-monarch"}
    ]
    stuck["spec"]["containers"][0]["name"] = container
    assert f"Set $MESHGATE_{container.upper()}_IMAGE or " in the_problem(stuck).message


def test_a_mount_that_waits_for_a_cache_of_the_kubelet_is_no_problem() -> None:
    stuck = waiting("ContainerCreating")
    text = 'MountVolume.SetUp failed for volume "token": failed to sync secret cache: timed out'
    assert not examine_pod(stuck, [event(stuck, "FailedMount", text)]).problems
    assert the_problem(stuck, event(stuck, "FailedMount", 'secret "x" not found')).reason == "FailedMount"


def test_equal_problems_of_several_pods_are_one() -> None:
    found = [Problem(f"pod a-{number}", "Unschedulable", "no node") for number in range(9)]
    other = Problem("pod b", "Unschedulable", "no disk")
    controller = Problem("statefulset a", "Unschedulable", "no node")
    grouped = group_problems([*found, other, controller])
    assert [each.subject for each in grouped] == ["9 pods (a-0, a-1, …)", "pod b", "statefulset a"]
    assert group_problems(found[:2])[0].subject == "2 pods (a-0, a-1)"


def test_a_quota_counts_the_requests_and_limits_of_all_pods() -> None:
    made = pod()
    made["spec"]["containers"][0]["resources"] = {
        "requests": {"cpu": "500m", "memory": "1Gi"},
        "limits": {"memory": "2Gi"},
    }
    hard = {"cpu": "1", "requests.memory": "2Gi", "limits.memory": "5Gi", "pods": "4", "count/secrets": "0"}
    used = {"requests.memory": "1Gi", "limits.memory": "2Gi", "pods": "3"}
    quota = {"metadata": {"name": "q"}, "spec": {"hard": hard}, "status": {"hard": hard, "used": used}}
    assert list(quota_shortages(quota, [made, made])) == [
        "quota q has 1Gi of requests.memory left, and the job needs 2Gi",
        "quota q has 3Gi of limits.memory left, and the job needs 4Gi",
        "quota q has 1 of pods left, and the job needs 2",
    ]


def test_a_quota_for_some_pods_only_is_left_to_the_api_server() -> None:
    quota = {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "0"}, "scopes": ["BestEffort"]}}
    assert list(quota_shortages(quota, [pod()])) == []


def test_one_image_that_several_pods_cannot_pull_is_one_problem() -> None:
    found = [Problem(f"pod {each}", each, "not found") for each in ("ErrImagePull", "ImagePullBackOff")]
    assert [each.subject for each in group_problems(found)] == ["2 pods (ErrImagePull, ImagePullBackOff)"]


def test_a_failed_pull_and_its_back_off_are_one_problem() -> None:
    assert the_problem(waiting("ErrImagePull")).key == the_problem(waiting("ImagePullBackOff")).key


@pytest.mark.parametrize(
    ("reason", "timeout"),
    [("InvalidImageName", 0), ("ErrImageNeverPull", 0), ("CreateContainerConfigError", 10.0)],
)
def test_other_reasons_of_a_waiting_container(reason: str, timeout: float) -> None:
    problem = the_problem(waiting(reason, "because"))
    assert (problem.reason, problem.timeout) == (reason, timeout)
    assert problem.message.startswith("because")
    assert ("MESHGATE_WORKER_IMAGE" in problem.message) is ("Image" in reason)


def test_a_crash_is_reported_with_exit_code_and_log() -> None:
    ended = {"terminated": {"exitCode": 3, "reason": "Error"}}
    problem = the_problem(waiting("CrashLoopBackOff", lastState=ended, restartCount=1))
    assert problem.message == "container worker ended with exit code 3, 2 times"
    assert problem.timeout == 0
    assert problem.log_of == ContainerLog("trainer-workers-0", "worker", previous=True)
    assert str(problem.with_log("a\nb\n")).endswith("Its last output:\n    a\n    b")


def test_the_log_of_an_image_for_another_architecture_is_explained() -> None:
    ended = {"terminated": {"exitCode": 255, "reason": "Error"}}
    problem = the_problem(waiting("CrashLoopBackOff", lastState=ended, restartCount=1))
    assert "architecture" not in problem.with_log("exec /usr/bin/python: permission denied").message
    explained = problem.with_log("exec /opt/meshgate/bin/python: exec format error\n").message
    assert "another architecture than the node: build it with --platform=linux/amd64" in explained


def test_a_container_that_restarted_after_a_crash_has_no_problem() -> None:
    restarted = pod(
        ready=False,
        containerStatuses=[
            {
                "name": "worker",
                "state": {"running": {}},
                "lastState": {"terminated": {"exitCode": 1}},
                "restartCount": 1,
            }
        ],
    )
    assert not examine_pod(restarted).problems


def test_a_container_killed_for_its_memory_is_reported_with_the_limit() -> None:
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    hungry = waiting("CrashLoopBackOff", lastState=ended, restartCount=1)
    hungry["spec"]["containers"][0]["resources"] = {"limits": {"memory": "64Mi"}}
    problem = the_problem(hungry)
    assert problem.reason == "OOMKilled"
    assert "it exceeded its memory limit of 64Mi: raise the limit" in problem.message


QUOTA = (
    'create Pod trainer-workers-0 in StatefulSet trainer-workers failed error: pods "trainer-workers-0" is forbidden: '
    "exceeded quota: small, requested: pods=1, used: pods=4, limited: pods=4"
)


def test_an_exceeded_quota_is_reported_with_amounts() -> None:
    failed = event(STATEFUL_SET, "FailedCreate", QUOTA)
    (problem,) = controller_problems([failed], {"statefulset trainer-workers": 2})
    assert str(problem) == (
        "statefulset trainer-workers: QuotaExceeded: quota small is exceeded: a pod requests pods=1; "
        "pods=4 of pods=4 is in use"
    )
    assert problem.timeout == 0


def test_an_earlier_rejection_is_not_a_problem_once_all_pods_exist() -> None:
    failed = event(STATEFUL_SET, "FailedCreate", QUOTA)
    assert list(controller_problems([failed], {"statefulset trainer-workers": 0})) == []
    assert list(controller_problems([failed], {})) == []


@pytest.mark.parametrize(
    ("reason", "timeout"),
    [
        ('pods "a" is forbidden: violates PodSecurity "restricted:latest"', 0),
        ('admission webhook "policy" denied the request', 0),
        ('failed calling webhook "policy": connection refused', 20.0),
        ('pods "a" is forbidden: error looking up service account', 20.0),
        ("Internal error occurred", 10.0),
    ],
)
def test_other_rejections_of_pods(reason: str, timeout: float) -> None:
    replica_set = {"kind": "ReplicaSet", "metadata": {"name": "trainer-gateway-abc"}}
    failed = event(replica_set, "FailedCreate", f"Error creating: {reason}")
    (problem,) = controller_problems([failed], {"replicaset trainer-gateway": 1})
    assert (problem.message, problem.timeout) == (reason, timeout)


MAXIMUM = 'pods "a" is forbidden: maximum cpu usage per Container is 2, but limit is 4'
RATIO = 'pods "a" is forbidden: cpu max limit to request ratio per Container is 4, but provided ratio is 16.000000'


@pytest.mark.parametrize(
    ("kind", "reason", "hint"),
    [
        ("ReplicaSet", MAXIMUM, "gateway=Compute(cpus=…)"),
        ("StatefulSet", MAXIMUM, "Compute(cpus=…)"),
        ("ReplicaSet", RATIO, "gateway=Compute(cpus=…)"),
        ("StatefulSet", 'pods "a" is forbidden: failed quota: q: must specify limits.cpu,limits.memory',
         "Compute(cpus=…, memory=…)"),
        ("StatefulSet", 'Pod "a" is invalid: "4": must be less than or equal to cpu limit', "Compute(cpus=…)"),
    ],
)  # fmt: skip
def test_resources_that_the_namespace_rejects_are_named_with_the_arguments_that_set_them(
    kind: str, reason: str, hint: str
) -> None:
    controller = {"kind": kind, "metadata": {"name": "trainer-x"}}
    failed = event(controller, "FailedCreate", f"Error creating: {reason}")
    (problem,) = controller_problems([failed], {f"{kind.lower()} trainer-x": 1})
    assert (problem.message, problem.timeout) == (f"{reason}. Set {hint}", 0)


def test_a_failed_mount_is_reported() -> None:
    creating = waiting("ContainerCreating")
    problem = the_problem(creating, event(creating, "FailedMount", 'secret "x" not found'))
    assert (problem.reason, problem.timeout) == ("FailedMount", 60.0)


@pytest.mark.parametrize(
    ("of", "reasons", "stage"),
    [
        (unschedulable(""), [], Stage.PENDING),
        (waiting("ContainerCreating"), ["Pulling"], Stage.PULLING),
        (waiting("ContainerCreating"), ["Pulling", "Pulled"], Stage.STARTING),
        (waiting("ContainerCreating"), [], Stage.STARTING),
        (pod(ready=False, phase="Running"), [], Stage.RUNNING),
        (pod(), ["Pulling"], Stage.READY),
    ],
)
def test_the_stage_of_a_starting_pod(of: Object, reasons: list[str], stage: Stage) -> None:
    assert examine_pod(of, [event(of, reason) for reason in reasons]).stage is stage


def test_a_running_pod_that_is_not_ready_is_reported_with_its_probe() -> None:
    started = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    status = {"name": "worker", "containerID": "containerd://a", "ready": False, "state": started}
    starting = pod(ready=False, phase="Running", containerStatuses=[status])
    probe = "Readiness probe failed: dial tcp 10.0.0.1:26600: connect: connection refused"
    early = event(starting, "Unhealthy", probe, at="2026-01-01T00:00:02Z")
    assert not examine_pod(starting, [early]).problems
    late = event(starting, "Unhealthy", probe, at="2026-01-01T00:00:30Z")
    (problem,) = examine_pod(starting, [early, late]).problems
    assert (problem.reason, problem.message, problem.timeout) == ("NotReady", probe, None)
    assert problem.log_of == ContainerLog("trainer-workers-0", "worker", previous=False)


def test_the_latest_failed_pull_is_reported() -> None:
    stuck = waiting("ErrImagePull")
    first, latest = (event(stuck, "Failed", f'Failed to pull image "x": {why}') for why in ("i/o timeout", "not found"))
    problem = the_problem(stuck, first, latest)
    assert problem.message.startswith(latest["message"])
    assert problem.timeout == 0


@pytest.mark.parametrize(("restarts", "timeout"), [(0, None), (1, None), (2, 0)])
def test_a_container_that_ends_repeatedly_is_definite_even_before_its_back_off(
    restarts: int, timeout: float | None
) -> None:
    status = {"name": "worker", "state": {"terminated": {"exitCode": 1}}, "restartCount": restarts}
    problem = the_problem(pod(ready=False, containerStatuses=[status]))
    assert (problem.reason, problem.timeout) == ("Crashed", timeout)
    assert problem.log_of == ContainerLog("trainer-workers-0", "worker", previous=False)


def running(memory: str, phase: str = "Running") -> Object:
    """A pod on node0."""
    other = pod("other", phase=phase)
    other["spec"] |= {"nodeName": "node0", "containers": [{"resources": {"requests": {"memory": memory}}}]}
    return other


def test_a_shortage_counts_the_pods_of_each_node() -> None:
    cluster = Cluster([node("node0", memory="8Gi"), node("node1", memory="1Gi")], [running("6Gi")])
    (shortage,) = shortages(unschedulable(MESSAGE, memory="4Gi"), cluster, MESSAGE)
    assert not shortage.impossible
    assert str(shortage) == "Insufficient memory: the pod requests 4Gi, no node has more than 2Gi free (2Gi short)"


class CountedPods(list[Object]):
    passes = 0

    def __iter__(self) -> Iterator[Object]:
        self.passes += 1
        return super().__iter__()


def test_the_pods_of_the_cluster_are_counted_once_for_any_number_of_pending_pods() -> None:
    others = CountedPods([running("6Gi")])
    cluster = Cluster([node("node0", memory="8Gi")], others)
    for _ in range(100):
        assert shortages(unschedulable(MESSAGE, memory="4Gi"), cluster, MESSAGE)
    assert others.passes == 1


def test_finished_pods_use_no_resources() -> None:
    cluster = Cluster([node("node0", memory="8Gi")], [running("6Gi", phase="Succeeded")])
    assert shortages(unschedulable(MESSAGE, memory="4Gi"), cluster, MESSAGE) == []


def test_a_request_beyond_the_largest_node_is_impossible() -> None:
    (shortage,) = shortages(unschedulable(MESSAGE, memory="16Gi"), Cluster([node(memory="8Gi")]), MESSAGE)
    assert shortage.impossible
    assert str(shortage) == "Insufficient memory: the pod requests 16Gi, the largest node has 8Gi (8Gi short)"


def test_without_access_to_the_nodes_there_are_no_shortages() -> None:
    assert shortages(unschedulable(MESSAGE, memory="16Gi"), None, MESSAGE) == []


def test_requests_are_those_of_all_containers_or_of_the_largest_init_container() -> None:
    def container(cpu: str) -> Object:
        return {"resources": {"requests": {"cpu": cpu}}}

    made = pod()
    made["spec"] = {"containers": [container("1"), container("500m")], "initContainers": [container("1")]}
    assert requests(made) == {"cpu": Decimal("1.5")}
    made["spec"]["initContainers"].append(container("4"))
    assert requests(made) == {"cpu": Decimal("4")}
