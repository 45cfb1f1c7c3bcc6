"""What is wrong with pods that are not up, and how long to wait for it to pass."""

from __future__ import annotations

import pytest

from meshgate_kubernetes.capacity import Cluster
from meshgate_kubernetes.waiting import LogOf, Problem, Stage, diagnose, stage
from tests.gateway.kubernetes.objects import Object, event, node, pod, unschedulable, waiting

STATEFUL_SET: Object = {"kind": "StatefulSet", "metadata": {"name": "trainer-workers"}}


def the_problem(of: Object, *events: Object, cluster: Cluster | None = None) -> Problem:
    (problem,) = diagnose([of], list(events), missing={}, cluster=cluster)
    return problem


def test_a_ready_pod_has_no_problem_whatever_happened_to_it_before() -> None:
    assert diagnose([pod()], [event(pod(), "Failed", "Failed to pull image")], missing={}) == []


def test_a_pod_that_is_being_deleted_is_nobodys_problem() -> None:
    going = waiting("CrashLoopBackOff")
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert diagnose([going], [], missing={}) == []


def test_a_resource_that_no_node_has_is_told_with_the_numbers() -> None:
    asked = unschedulable("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.", **{"nvidia_com/gpu": "8"})
    problem = the_problem(asked, cluster=Cluster([node(**{"nvidia_com/gpu": "2"})]))
    assert problem.reason == "Unschedulable"
    assert problem.message.startswith(
        "Insufficient nvidia.com/gpu: it asks for 8, the largest node has 2 (6 short). 0/1 nodes are available"
    )
    assert problem.patience == 15.0


def test_a_resource_that_is_only_in_use_is_waited_for() -> None:
    other = pod("other")
    other["spec"] |= {"nodeName": "node0", "containers": [{"resources": {"requests": {"memory": "3Gi"}}}]}
    asked = unschedulable("0/1 nodes are available: 1 Insufficient memory.", memory="2Gi")
    problem = the_problem(asked, cluster=Cluster([node(memory="4Gi")], [other]))
    assert "it asks for 2Gi, no node has more than 1Gi free (1Gi short)" in problem.message
    assert problem.patience is None


def test_what_an_autoscaler_is_working_on_is_waited_for() -> None:
    asked = unschedulable("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.", **{"nvidia_com/gpu": "8"})
    problem = the_problem(asked, event(asked, "TriggeredScaleUp"), cluster=Cluster([node()]))
    assert problem.patience is None
    assert "The autoscaler is adding a node" in problem.message


def test_a_user_who_may_not_see_nodes_waits_and_is_told_what_the_scheduler_says() -> None:
    problem = the_problem(unschedulable("0/9 nodes are available: 9 Insufficient cpu.", cpu="64"))
    assert problem.message == "0/9 nodes are available: 9 Insufficient cpu."
    assert problem.patience is None


def test_a_selector_that_no_node_matches_is_hopeless_once_no_autoscaler_steps_in() -> None:
    said = "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity."
    assert the_problem(unschedulable(said), cluster=Cluster([node()])).patience == 15.0


@pytest.mark.parametrize(
    ("said", "patience"),
    [
        ('Failed to pull image "x": rpc error: manifest unknown', 0),
        ('Failed to pull image "x": not found', 0),
        ('Failed to pull image "x": unauthorized', 0),
        ('Failed to pull image "x": dial tcp: i/o timeout', 20.0),
    ],
)
def test_an_image_that_cannot_be_had_is_hopeless_at_once_when_that_is_certain(said: str, patience: float) -> None:
    stuck = waiting("ImagePullBackOff", 'Back-off pulling image "x"')
    problem = the_problem(stuck, event(stuck, "Failed", said), event(stuck, "BackOff", "Back-off"))
    assert (problem.message, problem.patience) == (said, patience)


def test_the_first_failed_pull_and_the_waiting_after_it_are_one_problem() -> None:
    assert the_problem(waiting("ErrImagePull")).key == the_problem(waiting("ImagePullBackOff")).key


@pytest.mark.parametrize(
    ("reason", "patience"),
    [("InvalidImageName", 0), ("ErrImageNeverPull", 0), ("CreateContainerConfigError", 10.0)],
)
def test_other_reasons_why_a_container_waits(reason: str, patience: float) -> None:
    problem = the_problem(waiting(reason, "because"))
    assert (problem.reason, problem.message, problem.patience) == (reason, "because", patience)


def test_a_crash_is_shown_with_its_exit_code_and_its_log() -> None:
    ended = {"terminated": {"exitCode": 3, "reason": "Error"}}
    problem = the_problem(waiting("CrashLoopBackOff", lastState=ended, restartCount=1))
    assert problem.message == "container worker ended with exit code 3, 2 times"
    assert problem.patience == 0
    assert problem.log_of == LogOf("trainer-workers-0", "worker", previous=True)
    assert str(problem.with_log("a\nb\n")).endswith("Its last output:\n    a\n    b")


def test_a_container_that_came_back_after_a_crash_is_given_its_chance() -> None:
    again = pod(
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
    assert diagnose([again], [], missing={}) == []


def test_a_container_that_outgrew_its_memory_is_told_its_limit() -> None:
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    hungry = waiting("CrashLoopBackOff", lastState=ended, restartCount=1)
    hungry["spec"]["containers"][0]["resources"] = {"limits": {"memory": "64Mi"}}
    problem = the_problem(hungry)
    assert problem.reason == "OOMKilled"
    assert "more than its limit of 64Mi" in problem.message


QUOTA = (
    'create Pod trainer-workers-0 in StatefulSet trainer-workers failed error: pods "trainer-workers-0" is forbidden: '
    "exceeded quota: small, requested: pods=1, used: pods=4, limited: pods=4"
)


def test_a_quota_that_leaves_no_room_is_told_with_the_numbers() -> None:
    refused = event(STATEFUL_SET, "FailedCreate", QUOTA)
    (problem,) = diagnose([], [refused], missing={"statefulset trainer-workers": 2})
    assert str(problem) == (
        "statefulset trainer-workers: QuotaExceeded: quota small leaves no room: a pod asks for pods=1; "
        "in use: pods=4, of pods=4"
    )
    assert problem.patience == 0


def test_a_refusal_that_has_passed_is_not_told() -> None:
    refused = event(STATEFUL_SET, "FailedCreate", QUOTA)
    assert diagnose([], [refused], missing={"statefulset trainer-workers": 0}) == []
    assert diagnose([], [refused], missing={}) == []


@pytest.mark.parametrize(
    ("why", "patience"),
    [
        ('pods "a" is forbidden: violates PodSecurity "restricted:latest"', 0),
        ('admission webhook "policy" denied the request', 0),
        ('failed calling webhook "policy": connection refused', 20.0),
        ('pods "a" is forbidden: error looking up service account', 20.0),
        ("Internal error occurred", 10.0),
    ],
)
def test_other_refusals_of_pods(why: str, patience: float) -> None:
    replica_set = {"kind": "ReplicaSet", "metadata": {"name": "trainer-gateway-abc"}}
    refused = event(replica_set, "FailedCreate", f"Error creating: {why}")
    (problem,) = diagnose([], [refused], missing={"replicaset trainer-gateway": 1})
    assert (problem.message, problem.patience) == (why, patience)


def test_a_volume_that_cannot_be_mounted_is_told() -> None:
    creating = waiting("ContainerCreating")
    problem = the_problem(creating, event(creating, "FailedMount", 'secret "x" not found'))
    assert (problem.reason, problem.patience) == ("FailedMount", 60.0)


@pytest.mark.parametrize(
    ("of", "reasons", "at"),
    [
        (unschedulable(""), [], Stage.PENDING),
        (waiting("ContainerCreating"), ["Pulling"], Stage.PULLING),
        (waiting("ContainerCreating"), ["Pulling", "Pulled"], Stage.STARTING),
        (waiting("ContainerCreating"), [], Stage.STARTING),
        (pod(ready=False, phase="Running"), [], Stage.RUNNING),
        (pod(), ["Pulling"], Stage.READY),
    ],
)
def test_where_a_pod_is_on_its_way_up(of: Object, reasons: list[str], at: Stage) -> None:
    assert stage(of, [event(of, reason) for reason in reasons]) is at


def test_a_pod_that_runs_and_does_not_become_ready_says_what_its_probe_says() -> None:
    began = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    status = {"name": "worker", "containerID": "containerd://a", "ready": False, "state": began}
    starting = pod(ready=False, phase="Running", containerStatuses=[status])
    probe = "Readiness probe failed: dial tcp 10.0.0.1:26600: connect: connection refused"
    early = event(starting, "Unhealthy", probe, at="2026-01-01T00:00:02Z")
    assert diagnose([starting], [early], missing={}) == []
    late = event(starting, "Unhealthy", probe, at="2026-01-01T00:00:30Z")
    (problem,) = diagnose([starting], [early, late], missing={})
    assert (problem.reason, problem.message, problem.patience) == ("NotReady", probe, None)
    assert problem.log_of == LogOf("trainer-workers-0", "worker", previous=False)
