"""Faults in the cluster while a job is in use."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from meshgate import Compute, KubernetesJob
from meshgate.errors import GatewayLostError, JobError, StepFailedError, SupervisionError
from tests.kubernetes.actors import Hanging, Trainer
from tests.kubernetes.api_server import restart_api_server
from tests.kubernetes.cluster import Kubectl
from tests.waiting import wait_for

REPORTED_WITHIN = 300.0  # seconds: a few on an idle machine; the calls themselves take twice as long


def assert_reports(error: SupervisionError, rank: int, pod: str, reason: str) -> None:
    assert error.failure is not None
    assert error.failure.ranks == (rank,)
    assert error.failure.hosts[rank] == pod
    for text in (f"rank {rank}", pod, reason):
        assert text in str(error)


def test_a_pod_deleted_during_a_call_is_reported_with_the_reason(namespace: str, kubectl: Kubectl) -> None:
    with KubernetesJob(compute=Compute(replicas=2), name="victim", namespace=namespace) as job:
        procs = job.state().workers.spawn_procs()
        trainers = procs.spawn("trainers", Trainer)
        trainers.pod.call().get(timeout=60)
        call = procs.spawn("hanging", Hanging).hang.call()
        kubectl("delete", "pod", "victim-workers-1", "--wait=false", "--grace-period=3")
        with pytest.raises(SupervisionError) as caught:
            call.get(timeout=REPORTED_WITHIN)
        assert_reports(caught.value, 1, "victim-workers-1", "its pod is being deleted")
        assert trainers.slice(hosts=0).pod.call_one().get(timeout=60) == "victim-workers-0"


def evict(kubectl: Kubectl, pod: str, seconds: int) -> None:
    """As a drain does, and whatever else takes a node back in an orderly way. The pod has ``seconds`` to end."""
    served = kubectl("api-versions").split()
    version = "policy/v1" if "policy/v1" in served else "policy/v1beta1"  # before 1.22
    head = {"name": pod, "namespace": kubectl.namespace}
    options = {"gracePeriodSeconds": seconds}
    eviction = {"apiVersion": version, "kind": "Eviction", "metadata": head, "deleteOptions": options}
    path = f"/api/v1/namespaces/{kubectl.namespace}/pods/{pod}/eviction"
    kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))


@pytest.mark.slow
def test_a_driver_has_notice_of_an_eviction_saves_and_continues_on_the_replacement(
    namespace: str, kubectl: Kubectl, capfd: pytest.CaptureFixture[str]
) -> None:
    pods = {"terminationGracePeriodSeconds": 300}
    with KubernetesJob(compute=Compute(replicas=2, pod_spec=pods), name="evicted", namespace=namespace) as job:
        hosts = job.state().workers
        procs = hosts.spawn_procs()
        trainers = procs.spawn("trainers", Trainer)
        trainers.pod.call().get(timeout=60)
        step = trainers.wait.call(3.0)  # longer than it takes to end a pod whose worker obeys SIGTERM at once
        evict(kubectl, "evicted-workers-1", 300)
        (ending,) = wait_for(lambda: hosts.ending, "the notice")
        assert ending.name == "evicted-workers-1"
        assert "its pod is being deleted" in ending.reason
        assert ending.seconds_left <= 300
        assert [*step.get(timeout=60).values()] == ["waited", "waited"]
        saved = trainers.pod.call().get(timeout=60)
        assert sorted(saved.values()) == ["evicted-workers-0", "evicted-workers-1"]
        procs.stop().get(timeout=60)
        hosts.initialized.get(timeout=120)  # a pod in which nothing runs any more does not wait for its grace period
        assert hosts.ending == ()
        again = hosts.spawn_procs().spawn("again", Trainer)
        assert sorted(again.pod.call().get(timeout=60).values()) == ["evicted-workers-0", "evicted-workers-1"]
    notices = re.findall(r"host (\S+) will end in (\d+) s: its pod is being deleted", capfd.readouterr().err)
    assert notices == [("evicted-workers-1", "300")]  # and none of the end of the job


@pytest.mark.slow
def test_a_driver_has_notice_of_a_container_that_its_kubelet_stops_by_itself(
    namespace: str, kubectl: Kubectl, capfd: pytest.CaptureFixture[str]
) -> None:
    """Here because of a probe: the kubelet of a node that shuts down does the same with each container of it."""
    probe = {"exec": {"command": ["test", "!", "-e", "/tmp/unwell"]}, "periodSeconds": 1, "failureThreshold": 1,
             "timeoutSeconds": 60}  # fmt: skip
    pods = {"containers": [{"name": "worker", "livenessProbe": probe}], "terminationGracePeriodSeconds": 60}
    with KubernetesJob(compute=Compute(pod_spec=pods), name="stopped", namespace=namespace) as job:
        hosts = job.state().workers
        procs = hosts.spawn_procs()
        trainers = procs.spawn("trainers", Trainer)
        trainers.pod.call_one().get(timeout=60)
        kubectl("exec", "stopped-workers-0", "--", "touch", "/tmp/unwell")
        (ending,) = wait_for(lambda: hosts.ending, "the notice")
        kubectl("exec", "stopped-workers-0", "--", "rm", "/tmp/unwell")
        assert ending.name == "stopped-workers-0"
        assert ending.seconds_left <= 60
        assert trainers.pod.call_one().get(timeout=60) == "stopped-workers-0"
        procs.stop().get(timeout=60)  # and the container ends with them
    notices = re.findall(r"host (\S+) will end in (\d+) s: (.*)", capfd.readouterr().err)
    why = "the kubelet of its node is stopping it (Container worker failed liveness probe, will be restarted)"
    assert notices == [("stopped-workers-0", "60", why)]


def test_state_waits_for_the_pod_that_replaces_a_lost_one(namespace: str, kubectl: Kubectl) -> None:
    with KubernetesJob(compute=Compute(replicas=2), name="replaced", namespace=namespace) as job:
        trainers = job.state(wait=True).workers.spawn_procs().spawn("trainers", Trainer)
        trainers.pod.call().get(timeout=60)
        call = trainers.wait.call(100.0)
        kubectl("delete", "pod", "replaced-workers-1", "--wait=false", "--grace-period=3")
        with pytest.raises(SupervisionError):
            call.get(timeout=60)
        again = job.state(wait=120).workers.spawn_procs().spawn("again", Trainer)
        assert sorted(again.pod.call().get(timeout=60).values()) == ["replaced-workers-0", "replaced-workers-1"]


def test_a_process_out_of_memory_is_reported_with_rank_and_pod(namespace: str) -> None:
    compute = Compute(replicas=2, memory="500Mi")
    with KubernetesJob(compute=compute, name="starving", namespace=namespace) as job:
        trainers = job.state().workers.spawn_procs(per_host={"gpus": 2}).spawn("trainers", Trainer)
        victim, sibling = (trainers.slice(hosts=1, gpus=rank) for rank in range(2))
        ended = sibling.wait_ended.call_one(victim.process.call_one().get(timeout=60))
        filling = victim.fill.call_one(700)
        ended.get(timeout=60)  # a pod near its limit is slow, and how slow depends on its node
        with pytest.raises(SupervisionError) as caught:
            filling.get(timeout=REPORTED_WITHIN)
        assert_reports(caught.value, 2, "starving-workers-1", "failed: ")  # Monarch does not always report the signal
        assert trainers.slice(hosts=0, gpus=0).pod.call_one().get(timeout=60) == "starving-workers-0"
        again = job.state().workers.spawn_procs().spawn("again", Trainer)
        assert len(again.pod.call().get(timeout=60)) == 2


def test_a_deleted_gateway_is_reported_and_the_job_can_be_applied_again(namespace: str, kubectl: Kubectl) -> None:
    with KubernetesJob(compute=Compute(), name="headless", namespace=namespace) as job:
        procs = job.state().workers.spawn_procs()
        process = procs.spawn("trainers", Trainer).process.call_one().get(timeout=60)
        call = procs.spawn("hanging", Hanging).hang.call_one()
        kubectl("delete", "pod", "-l", "meshgate.dev/job=headless,app.kubernetes.io/component=gateway", "--wait=false")
        with pytest.raises(GatewayLostError, match="headless-gateway"):
            call.get(timeout=REPORTED_WITHIN)
        kubectl("rollout", "status", "deployment/headless-gateway", "--timeout=180s", timeout=190)
        job.apply()
        again = job.state().workers.spawn_procs().spawn("trainers", Trainer)
        assert again.pod.call_one().get(timeout=60) == "headless-workers-0"
        exists = ("exec", "headless-workers-0", "--", "ls", "/proc")
        wait_for(lambda: process not in kubectl(*exists).split(), "the process of the lost session to end")


def test_attaching_to_a_session_that_was_lost_with_the_gateway_says_why(namespace: str, kubectl: Kubectl) -> None:
    job = KubernetesJob(compute=Compute(), name="lost", namespace=namespace, detached="train")
    try:
        with job:
            trainers = job.state(cached_path=None).workers.spawn_procs().spawn("trainers", Trainer)
            trainers.pod.call_one().get(timeout=60)
            (pod,) = kubectl("get", "pod", "-l", "app.kubernetes.io/component=gateway,meshgate.dev/job=lost",
                             "-o", "jsonpath={.items[*].metadata.name}").split()  # fmt: skip
            call = trainers.wait.call_one(100.0)
            kubectl.end_container(pod)
            with pytest.raises(GatewayLostError):
                call.get(timeout=60)
        status = ".status.containerStatuses[0]"
        kubectl.watch_pod(pod, f"{{{status}.restartCount}}{{{status}.ready}}", lambda seen: seen == "1true")
        why = r"does not have session 'train'\..* Sessions end with their gateway: the container of pod lost-gateway-"
        with pytest.raises(JobError, match=why):
            KubernetesJob(name="lost", namespace=namespace).attach("train", cached_path=None)
    finally:
        KubernetesJob(name="lost", namespace=namespace).kill()


def test_a_job_goes_on_when_its_pods_are_deleted_by_force_as_soon_as_others_have_returned(
    namespace: str, kubectl: Kubectl
) -> None:
    def spawned() -> list[str] | None:
        hosts = job.state().workers
        try:
            hosts.initialized.get(timeout=90)
            return list(hosts.spawn_procs().spawn("again", Trainer).pod.call().get(timeout=60).values())
        except (StepFailedError, SupervisionError):  # never TimeoutError: nothing waits for a pod that is gone
            return None

    with KubernetesJob(compute=Compute(replicas=2), name="forced", namespace=namespace) as job:
        assert spawned() == ["forced-workers-0", "forced-workers-1"]
        for rank in (0, 1, 1):
            pod = f"forced-workers-{rank}"
            before = kubectl("get", "pod", pod, "-o", "jsonpath={.metadata.uid}")
            kubectl("delete", "pod", pod, "--force", "--grace-period=0")
            state = "{.metadata.uid} {.status.containerStatuses[0].ready}"
            kubectl.watch_pod(pod, state, lambda state, old=before: old not in state and state.endswith("true"))  # type: ignore[misc]
        assert wait_for(spawned, "a spawn on both pods") == ["forced-workers-0", "forced-workers-1"]


@pytest.mark.disturbing
def test_a_restart_of_the_api_server_loses_nothing(namespace: str, kubectl: Kubectl) -> None:
    with KubernetesJob(compute=Compute(replicas=2), name="upgrade", namespace=namespace) as job:
        trainers = job.state().workers.spawn_procs().spawn("trainers", Trainer)
        trainers.pod.call().get(timeout=60)
        before = trainers.wait.call(5.0)
        restart_api_server(kubectl)
        after = trainers.train_step.call(batch_size=1)
        assert [*before.get(timeout=60).values()] == ["waited", "waited"]
        assert len(after.get(timeout=60)) == 2


@contextmanager
def drained(kubectl: Kubectl, pods: str) -> Iterator[str]:
    """Drains the node of these pods for the block. Yields what kubectl reports within 10 s."""
    node = kubectl("get", "pods", "-l", pods, "-o", "jsonpath={.items[0].spec.nodeName}")
    drain = ["kubectl", "drain", node, "--pod-selector", pods, "--delete-emptydir-data", "--timeout=10s",
             "--grace-period=3"]  # fmt: skip
    try:
        done = subprocess.run(drain, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode != 0, done.stdout
        yield done.stderr
    finally:
        kubectl("uncordon", node)


@pytest.mark.disturbing
def test_draining_a_node_spares_the_gateway_and_its_session_reports_the_worker(
    namespace: str, kubectl: Kubectl
) -> None:
    with KubernetesJob(compute=Compute(), name="drained", namespace=namespace) as job:
        procs = job.state().workers.spawn_procs()
        procs.spawn("trainers", Trainer).pod.call_one().get(timeout=60)
        call = procs.spawn("hanging", Hanging).hang.call_one()
        with drained(kubectl, "meshgate.dev/job=drained") as report:
            assert re.search(r"drained-gateway-\S+ .*violate the pod's disruption budget", report)
            with pytest.raises(SupervisionError) as caught:
                call.get(timeout=REPORTED_WITHIN)
            assert_reports(caught.value, 0, "drained-workers-0", "its pod is being deleted")
        hosts = job.state().workers  # of the same session; the pod that replaces the evicted one has a node now
        hosts.initialized.get(timeout=90)
        assert hosts.spawn_procs().spawn("again", Trainer).pod.call_one().get(timeout=60) == "drained-workers-0"
