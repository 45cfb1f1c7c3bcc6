"""A mesh of a running job grows and shrinks, while processes on hosts that stay continue."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest
from typer.testing import CliRunner

from meshgate import Actor, Compute, KubernetesJob, endpoint
from meshgate.cli.app import app
from meshgate.errors import JobError, SupervisionError
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import Conflict
from meshgate_kubernetes.jobs import lifecycle
from meshgate_kubernetes.jobs.scaling import scale
from meshgate_kubernetes.manifests.job_objects import CHANGE_ANNOTATION
from tests.clusters.kubernetes.fake_api import IgnoreProgress
from tests.kubernetes.actors import Counter, Trainer
from tests.kubernetes.cluster import Kubectl, own_namespace
from tests.kubernetes.test_waiting import wait_counted
from tests.projects import project_in

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Reader(Actor):
    """Imports a module that only the sync brings."""

    @endpoint
    def step(self) -> int:
        from scaled_model import STEP  # type: ignore[import-not-found]

        return int(STEP)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with project_in(tmp_path, monkeypatch, {"scaled_model.py": "STEP = 1\n"}) as directory:
        yield directory


@pytest.fixture
def job(namespace: str) -> Iterator[KubernetesJob]:
    with KubernetesJob(compute=Compute(), name="scaled", namespace=namespace) as job:
        yield job


def pods(kubectl: Kubectl) -> list[str]:
    selector = "meshgate.dev/job=scaled,meshgate.dev/mesh=workers"
    return kubectl("get", "pods", "-l", selector, "-o", "jsonpath={.items[*].metadata.name}").split()


def test_a_mesh_grows_and_shrinks_while_a_process_of_its_first_host_continues(
    project: Path, job: KubernetesJob, kubectl: Kubectl
) -> None:
    first = job.state().workers
    counter = first.spawn_procs().spawn("counter", Counter)
    counter.add.call_one(1, b"").get(timeout=60)
    (project / "scaled_model.py").write_text("STEP = 2\n")
    job.sync()

    job.scale("workers", 2)
    both = job.state().workers
    assert (first.sizes, both.sizes) == ({"hosts": 1}, {"hosts": 2})
    procs = both.spawn_procs(name="wide")
    readers = procs.spawn("readers", Reader)
    assert [*readers.step.call().get(timeout=120).values()] == [2, 2]  # the newcomer has the present code, too
    counter.add.call_one(2, b"").get(timeout=60)

    in_use = r"'wide' of session .* \(scaled-workers-1\)\. Nothing was changed\. Stop them first"
    with pytest.raises(JobError, match=in_use):
        job.scale("workers", 1)
    assert pods(kubectl) == ["scaled-workers-0", "scaled-workers-1"]
    assert [*readers.step.call().get(timeout=60).values()] == [2, 2]

    procs.stop().get(timeout=60)
    job.scale("workers", 1)
    assert pods(kubectl) == ["scaled-workers-0"]
    assert job.state().workers.sizes == {"hosts": 1}
    with pytest.raises(SupervisionError, match=r"scaled-workers-1: job\.scale\(\) has removed it"):
        both.initialized.get(timeout=60)
    counter.add.call_one(3, b"").get(timeout=60)
    (project / "scaled_model.py").write_text("STEP = 3\n")
    job.sync()  # it does not wait for the host that is gone
    assert counter.all.call_one().get(timeout=60) == [1, 2, 3]


def test_other_programs_and_a_further_gateway_follow(job: KubernetesJob, namespace: str, kubectl: Kubectl) -> None:
    job.apply()
    other = KubernetesJob(name="scaled", namespace=namespace)
    job.scale("workers", 2)
    assert other.state(cached_path=None).workers.sizes == {"hosts": 2}
    job.scale("workers", 1)
    other.apply()
    assert other.state(cached_path=None).workers.sizes == {"hosts": 1}
    other.client.close()
    job.scale("workers", 2)
    kubectl("delete", "pod", "-l", "app.kubernetes.io/component=gateway,meshgate.dev/job=scaled", "--wait=true")
    kubectl("rollout", "status", "deployment/scaled-gateway", "--timeout=120s", timeout=130)
    trainers = job.state().workers.spawn_procs().spawn("trainers", Trainer)
    assert [*trainers.pod.call().get(timeout=120).values()] == ["scaled-workers-0", "scaled-workers-1"]


NAMES_ONE_HOST = """
import sys
from meshgate import Compute, KubernetesJob

with KubernetesJob(compute=Compute(), name="scaled", namespace=sys.argv[1]) as job:
    print(job.state().workers.sizes)
"""


def test_the_command_scales_a_job_and_a_submitted_program_with_its_first_number_uses_it(
    project: Path, job: KubernetesJob, namespace: str
) -> None:
    (project / "names_one_host.py").write_text(NAMES_ONE_HOST)
    job.state()
    done = CliRunner().invoke(app, ["scale", "-n", namespace, "scaled", "workers", "2"])
    assert (done.exit_code, done.stdout) == (0, "mesh workers has 2 hosts\n")
    run = job.submit(["python", "names_one_host.py", namespace], name="night")
    assert run.wait() == 0, "".join(run.logs())
    printed = "".join(run.logs())
    assert "has been scaled from {'workers': 1} to {'workers': 2} hosts\n" in printed
    assert "{'hosts': 2}\n" in printed


def test_a_job_has_one_change_at_a_time(job: KubernetesJob, namespace: str, kubectl: Kubectl, api: Api) -> None:
    job.apply()

    def ask(path: str, body: bytes | None) -> None:  # after the change has read the present number, before it begins
        job.scale("workers", 2)

    found = lifecycle.find(api, "scaled", namespace)
    with pytest.raises(Conflict, match="another program has changed the job at the same time"):
        scale(api, found, "workers", 3, IgnoreProgress(), timeout=60, ask_gateway=ask)
    assert pods(kubectl) == ["scaled-workers-0", "scaled-workers-1"]
    # As a program that is killed then leaves it:
    kubectl("annotate", "configmap", "scaled", f"{CHANGE_ANNOTATION}=workers=1")
    with pytest.raises(JobError, match="another program is changing mesh 'workers' to 1 hosts"):
        job.scale("workers", 3)
    job.scale("workers", 1)
    assert pods(kubectl) == ["scaled-workers-0"]
    assert CHANGE_ANNOTATION not in kubectl("get", "configmap", "scaled", "-o", "yaml")


def test_a_mesh_that_cannot_grow_stays_as_it_is_and_the_error_says_why(namespace: str) -> None:
    with own_namespace(f"{namespace}-scale") as kubectl:
        quota = {"hard": {"pods": "2"}}
        kubectl.apply({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}, "spec": quota})
        wait_counted(kubectl, "small")
        with KubernetesJob(compute=Compute(), name="scaled", namespace=kubectl.namespace) as job:
            trainers = job.state().workers.spawn_procs().spawn("trainers", Trainer)
            with pytest.raises(JobError, match=r"(?s)from 1 to 2 hosts: .*QuotaExceeded: quota small is exceeded"):
                job.scale("workers", 2)
            assert pods(kubectl) == ["scaled-workers-0"]
            assert trainers.pod.call_one().get(timeout=60) == "scaled-workers-0"
            path = "jsonpath={.spec.replicas}"
            assert kubectl("get", "statefulset", "scaled-workers", "-o", path) == "1"
