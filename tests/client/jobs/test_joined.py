"""Which job a submitted program takes for its own, and that it leaves it running."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from meshgate import JobError, JobUnsupported, KubernetesJob, LocalJob, ProcessJob, SlurmJob, native_hosts
from meshgate.jobs.joined import JoinedJob, _say_once
from meshgate.jobs.kubernetes.compute import Compute
from meshgate.session import gateway_client


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this process a program that was submitted to a job, which has been ``scaled`` to other meshes since."""

    def submit(
        kind: str, name: str = "", namespace: str = "", *, scaled: dict[str, Any] | None = None, **meshes: int
    ) -> None:
        answers = (
            {"/v1/job": scaled or {"meshes": meshes}} if name else {}
        )  # others cannot be scaled, and are not asked
        monkeypatch.setattr(gateway_client, "request_json", lambda dialer, path: answers[path])
        job = {"kind": kind, "name": name, "namespace": namespace, "meshes": meshes}
        monkeypatch.setenv("MESHGATE_RUN_JOB", json.dumps(job))
        monkeypatch.setenv("MESHGATE_RUN", "night")
        monkeypatch.setenv("MESHGATE_RUN_URL", "ws://127.0.0.1:1")
        monkeypatch.setenv("MESHGATE_RUN_TOKEN", "secret")
        _say_once.cache_clear()

    return submit


def kubernetes(name: str | None = None, namespace: str = "ml", **meshes: int) -> KubernetesJob:
    job = KubernetesJob(name=name, namespace=namespace)
    for mesh, count in meshes.items():
        job.add_mesh(mesh, count, compute=Compute())
    return job


def joined(job: Any) -> JoinedJob | None:
    """The job that ``apply()`` would use instead of a new one."""
    found = job._find_joined()
    assert found is None or isinstance(found, JoinedJob)
    return found


@pytest.mark.parametrize(
    ("job", "joins"),
    [
        (lambda: ProcessJob({"workers": 2}), True),
        (lambda: ProcessJob({"workers": 2}, env={"A": "b"}), True),
        (lambda: ProcessJob({"workers": 3}), False),
        (lambda: ProcessJob({"workers": 2, "loaders": 1}), False),
        (lambda: LocalJob({"workers": 2}), False),
        (lambda: SlurmJob({"workers": 2}), False),
    ],
)
def test_a_job_without_a_name_is_known_by_its_type_and_meshes(inside: Any, job: Any, joins: bool) -> None:
    inside("ProcessJob", workers=2)
    assert (joined(job()) is not None) is joins


class TeamJob(ProcessJob):
    """A type of a program, which it submits with its script."""


def test_a_type_that_extends_another_is_known_by_that(inside: Any) -> None:
    assert TeamJob({"workers": 2})._joinable().kind == "ProcessJob"
    inside("ProcessJob", workers=2)
    assert joined(TeamJob({"workers": 2})) is not None
    assert joined(TeamJob({"workers": 1})) is None


def test_a_slurm_job_is_known_by_its_meshes(inside: Any) -> None:
    inside("SlurmJob", workers=2)
    assert joined(SlurmJob({"workers": 2}, time_limit="5")) is not None
    assert joined(SlurmJob({"workers": 1})) is None


def test_a_job_with_a_name_is_known_by_it(inside: Any) -> None:
    inside("KubernetesJob", "trainer", "ml", workers=2)
    assert joined(kubernetes("trainer")) is not None
    assert joined(kubernetes("trainer", workers=2)) is not None
    assert joined(kubernetes(workers=2)) is not None
    assert joined(kubernetes("other", workers=2)) is None
    assert joined(kubernetes("trainer", "other", workers=2)) is None
    assert joined(kubernetes(workers=1)) is None
    with pytest.raises(JobError, match=r"this program runs in the job of that name, whose meshes are {'workers': 2}"):
        joined(kubernetes("trainer", workers=4))


def test_a_scaled_job_is_known_by_the_meshes_it_was_created_with_and_by_its_present_ones(
    inside: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    inside(
        "KubernetesJob", "trainer", "ml", workers=2, scaled={"meshes": {"workers": 8}, "created_with": {"workers": 2}}
    )
    described = [kubernetes("trainer", workers=8), kubernetes(workers=8), kubernetes("trainer")]
    found = [joined(each) for each in described]
    assert capfd.readouterr().err == ""
    found += [joined(kubernetes("trainer", workers=2)), joined(kubernetes(workers=2))]
    assert [each and each._mesh_sizes() for each in found] == [{"workers": 8}] * 5
    line = "the job of the run night, has been scaled from {'workers': 2} to {'workers': 8} hosts"
    assert capfd.readouterr().err == f"meshgate: KubernetesJob(ml/trainer), {line}\n"
    assert joined(kubernetes(workers=4)) is None
    with pytest.raises(JobError, match=r"whose meshes are {'workers': 8}"):
        joined(kubernetes("trainer", workers=4))


def test_a_program_that_runs_while_its_job_is_scaled_applies_it_again_for_the_new_hosts(inside: Any) -> None:
    inside("KubernetesJob", "trainer", "ml", workers=2)
    job = kubernetes("trainer")
    job.apply()
    assert isinstance(job._running, JoinedJob)
    inside(
        "KubernetesJob", "trainer", "ml", workers=2, scaled={"meshes": {"workers": 8}, "created_with": {"workers": 2}}
    )
    assert job._running._mesh_sizes() == {"workers": 2}
    job.apply()
    assert job._running._mesh_sizes() == {"workers": 8}


def test_no_job_is_joined_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHGATE_RUN_JOB", raising=False)
    assert joined(ProcessJob({"workers": 2})) is None


def test_the_job_is_left_to_its_owner_as_one_line_reports(inside: Any, capfd: pytest.CaptureFixture[str]) -> None:
    inside("ProcessJob", workers=2)
    for _ in range(2):
        with ProcessJob({"workers": 2}) as job:
            job.apply()
            assert job.active
            assert job._running is not None
            assert not job._running._ends_when_killed
        assert not job.active
    line = "left ProcessJob({'workers': 2}), the job of the run night, running: it belongs to the user who submitted"
    assert capfd.readouterr().err == f"meshgate: {line} this program\n"


def test_the_session_of_a_joined_job_is_closed(inside: Any) -> None:
    inside("ProcessJob", workers=2)
    closed: list[bool] = []
    with ProcessJob({"workers": 2}) as job:
        job.apply()
        client = type("Client", (), {"close": lambda self: closed.append(True)})()
        job._running._client = client  # type: ignore[union-attr]
    assert closed == [True]


def test_kill_does_not_end_a_job_that_was_not_applied(inside: Any, capfd: pytest.CaptureFixture[str]) -> None:
    inside("KubernetesJob", "trainer", "ml", workers=2)
    kubernetes("trainer").kill()
    assert "left KubernetesJob(ml/trainer)" in capfd.readouterr().err


def test_hosts_of_monarch_are_for_submitted_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHGATE_RUN_JOB", raising=False)
    with pytest.raises(JobUnsupported, match=r"Submit this program to a job, with job.submit\(\) or `meshgate submit`"):
        native_hosts("workers")
