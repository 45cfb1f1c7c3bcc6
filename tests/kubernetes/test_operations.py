"""What the operators of a cluster see of a job: its metrics and logs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from meshgate import Compute, KubernetesJob, SupervisionError
from tests.kubernetes.actors import Trainer
from tests.kubernetes.cluster import Kubectl


def printers(job: KubernetesJob) -> Any:
    return job.state(cached_path=None).workers.spawn_procs(per_host={"gpus": 2}).spawn("printers", Trainer)


def logged(kubectl: Kubectl, job: str) -> set[tuple[str, int, str, str, str]]:
    """The records of output in the log of a job's gateway: mesh, rank, stream, pod and text."""
    lines = kubectl("logs", f"deployment/{job}-gateway").splitlines()
    records = [json.loads(line) for line in lines if line.startswith("{")]
    return {
        (each["mesh"], each["rank"], each["stream"], each["host"], each["text"])
        for each in records
        if each["event"] == "output"
    }


def metrics(kubectl: Kubectl, job: str) -> dict[tuple[str, ...], float]:
    """The metrics that the pod's annotations lead to, without credentials."""
    pods = json.loads(kubectl("get", "pods", "-l", f"meshgate.dev/job={job}", "-o", "json"))["items"]
    (pod,) = (each for each in pods if each["metadata"]["annotations"].get("prometheus.io/scrape") == "true")
    notes = pod["metadata"]["annotations"]
    path = f"{pod['metadata']['name']}:{notes['prometheus.io/port']}/proxy{notes['prometheus.io/path']}"
    text = kubectl("get", "--raw", f"/api/v1/namespaces/{kubectl.namespace}/pods/{path}")
    families = text_string_to_metric_families(text)
    return {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}


def until(condition: Callable[[], bool]) -> None:
    """Asks the cluster until the condition holds: counts arrive some seconds late."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "not within 60 s"


def test_metrics_and_output_of_a_job_are_found_as_operators_look_for_them(namespace: str, kubectl: Kubectl) -> None:
    with KubernetesJob(compute=Compute(), name="watched", namespace=namespace) as job:
        actors = printers(job)
        actors.say.call("hello").get(timeout=60)
        with pytest.raises(SupervisionError):
            actors.slice(gpus=1).die.call_one("last words").get(timeout=60)
        until(lambda: metrics(kubectl, "watched").get(("meshgate_calls_total", "failed")) == 1)
        found = metrics(kubectl, "watched")
        printed = {
            ("printers", 0, "stdout", "watched-workers-0", "hello"),
            ("printers", 1, "stdout", "watched-workers-0", "hello"),
            ("printers", 1, "stdout", "watched-workers-0", "last words"),
        }
        until(lambda: printed <= logged(kubectl, "watched"))
    assert found["meshgate_calls_total", "ok"] >= 1
    assert found["meshgate_sessions", "connected"] == 1
    assert found["meshgate_output_lines_total",] >= 3
    assert found["meshgate_client_bytes_total", "received"] > 100
    assert found["meshgate_hosts", "present"] == 1


def test_output_stays_out_of_the_log_if_the_job_says_so(namespace: str, kubectl: Kubectl) -> None:
    with KubernetesJob(compute=Compute(), name="discreet", namespace=namespace, log_output=False) as job:
        printers(job).say.call("secret").get(timeout=60)
        until(lambda: metrics(kubectl, "discreet").get(("meshgate_output_lines_total",)) == 2)
        assert logged(kubectl, "discreet") == set()
