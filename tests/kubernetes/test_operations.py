"""What the operators of a cluster see of a job: its metrics and logs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from meshgate import Compute, KubernetesJob, SupervisionError
from tests.kubernetes.actors import Trainer
from tests.kubernetes.cluster import Kubectl
from tests.waiting import wait_for


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


def test_metrics_and_output_of_a_job_are_found_as_operators_look_for_them(namespace: str, kubectl: Kubectl) -> None:
    with KubernetesJob(compute=Compute(), name="watched", namespace=namespace) as job:
        actors = printers(job)
        actors.say.call("hello").get(timeout=60)
        with pytest.raises(SupervisionError):
            actors.slice(gpus=1).die.call_one("last words").get(timeout=60)
        least = {  # each of them arrives some seconds late
            ("meshgate_calls_total", "failed"): 1,
            ("meshgate_calls_total", "ok"): 1,
            ("meshgate_output_lines_total",): 3,
            ("meshgate_client_bytes_total", "received"): 101,
        }

        def counted() -> dict[tuple[str, ...], float] | None:
            found = metrics(kubectl, "watched")
            return found if all(found.get(name, 0) >= count for name, count in least.items()) else None

        found = wait_for(counted, "the counts")
        assert found is not None
        printed = {
            ("printers", 0, "stdout", "watched-workers-0", "hello"),
            ("printers", 1, "stdout", "watched-workers-0", "hello"),
            ("printers", 1, "stdout", "watched-workers-0", "last words"),
        }
        wait_for(lambda: printed <= logged(kubectl, "watched"), "the output in the log")
    assert found["meshgate_calls_total", "failed"] == 1
    assert found["meshgate_sessions", "connected"] == 1
    assert found["meshgate_hosts", "present"] == 1


def test_output_stays_out_of_the_log_if_the_job_says_so(namespace: str, kubectl: Kubectl) -> None:
    with KubernetesJob(compute=Compute(), name="discreet", namespace=namespace, log_output=False) as job:
        printers(job).say.call("secret").get(timeout=60)
        wait_for(lambda: metrics(kubectl, "discreet").get(("meshgate_output_lines_total",)) == 2, "the count of lines")
        assert logged(kubectl, "discreet") == set()
