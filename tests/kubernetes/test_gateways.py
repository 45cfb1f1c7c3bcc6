"""Gateways in front of the pod with the sessions: replaced under calls, in each way in which a cluster does it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from meshgate import Compute, KubernetesJob
from meshgate.errors import GatewayLostError
from tests.kubernetes.actors import Counter, Hanging
from tests.kubernetes.cluster import Kubectl
from tests.kubernetes.test_faults import REPORTED_WITHIN, evict
from tests.waiting import wait_for

IN_FLIGHT = 50
CALLS = 1_000  # before, and as many after
TIMEOUT = 120.0


def call_during(counter: Any, disturb: Callable[[], object]) -> tuple[int, float]:
    """Makes calls before, while and after ``disturb`` runs, and checks that each has its own result, and that all ran
    once and in order. Returns their number, and for how many seconds at most the driver waited for the next result."""
    in_flight: deque[tuple[int, Any]] = deque()
    longest, made, after = 0.0, 0, 0
    with ThreadPoolExecutor(1) as pool:
        disturbing = None
        while after < CALLS or in_flight:
            if made == CALLS and disturbing is None:
                disturbing = pool.submit(disturb)
            if after < CALLS:
                in_flight.append((made, counter.add.call_one(made, str(made).encode())))
                made += 1
                after += disturbing is not None and disturbing.done()
                if len(in_flight) < IN_FLIGHT:
                    continue
            number, call = in_flight.popleft()
            began = time.monotonic()
            assert call.get(timeout=TIMEOUT) == str(number).encode()
            longest = max(longest, time.monotonic() - began)
        assert disturbing is not None
        disturbing.result()
    assert counter.all.call_one().get(timeout=TIMEOUT) == list(range(made))
    return made, longest


class Gateways:
    """The pods of the gateway of a job with ``replicas=2``. After each method that replaces them, none that was there
    before is left, so the driver has had to connect to another one."""

    def __init__(self, kubectl: Kubectl, job: str) -> None:
        self._kubectl, self._job = kubectl, job

    def pods(self, component: str = "forwarder") -> list[str]:
        selector = f"meshgate.dev/job={self._job},app.kubernetes.io/component={component}"
        return self._kubectl("get", "pod", "-l", selector, "-o", "jsonpath={.items[*].metadata.name}").split()

    def delete(self) -> None:
        for pod in self.pods():
            self._kubectl("delete", "pod", pod)
            self._wait_ready()

    def drain(self) -> None:
        for pod in self.pods():
            wait_for(self._may_evict, "the budget to allow the next eviction")
            evict(self._kubectl, pod, 15)
            self._kubectl.wait_deleted(f"pod/{pod}")
            self._wait_ready()

    def upgrade(self) -> None:
        before = self.pods()
        self._kubectl("rollout", "restart", f"deployment/{self._job}-gateway")
        self._wait_ready()
        for pod in before:
            self._kubectl.wait_deleted(f"pod/{pod}")

    def _may_evict(self) -> bool:
        allowed = "jsonpath={.status.disruptionsAllowed}"
        return self._kubectl("get", "poddisruptionbudget", f"{self._job}-gateway", "-o", allowed) == "1"

    def _wait_ready(self) -> None:
        self._kubectl("rollout", "status", f"deployment/{self._job}-gateway", "--timeout=180s", timeout=190)


@pytest.mark.slow  # the replacement of six pods, one after the other, while calls take what processor time there is
def test_gateways_are_deleted_drained_and_upgraded_under_calls(namespace: str, kubectl: Kubectl) -> None:
    gateways = Gateways(kubectl, "forwarded")
    job = KubernetesJob(compute=Compute(), gateway=Compute(replicas=2), name="forwarded", namespace=namespace)
    with job:
        procs = job.state(cached_path=None).workers.spawn_procs()
        for disturb in (gateways.delete, gateways.drain, gateways.upgrade):
            before = gateways.pods()
            assert len(before) == 2
            counter = procs.spawn(disturb.__name__, Counter).slice(hosts=0)
            calls, longest = call_during(counter, disturb)
            print(f"{disturb.__name__}: {calls} calls; the driver waited {longest:.1f} s at most for the next result")
            assert set(before).isdisjoint(gateways.pods())


def test_the_pod_with_the_sessions_is_not_drained_and_its_loss_is_reported(namespace: str, kubectl: Kubectl) -> None:
    gateways = Gateways(kubectl, "divided")
    job = KubernetesJob(compute=Compute(), gateway=Compute(replicas=2), name="divided", namespace=namespace)
    with job:
        call = job.state(cached_path=None).workers.spawn_procs().spawn("hanging", Hanging).hang.call_one()
        (engines,) = gateways.pods("engines")
        with pytest.raises(AssertionError, match="would violate the pod's disruption budget"):
            evict(kubectl, engines, 15)
        kubectl("delete", "pod", engines, "--wait=false")
        with pytest.raises(GatewayLostError, match=engines):
            call.get(timeout=REPORTED_WITHIN)
        kubectl("rollout", "status", "deployment/divided-engines", "--timeout=180s", timeout=190)
        job.apply()
        again = job.state(cached_path=None).workers.spawn_procs().spawn("counter", Counter)
        assert again.all.call_one().get(timeout=TIMEOUT) == []
