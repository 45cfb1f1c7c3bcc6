"""A session for each test module, on a gateway with two hosts that all modules of a test process share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest

import meshgate as kt
from meshgate import MeshFailure, ProcessJob, job_loads
from tests.conftest import SHARED_VARIABLE
from tests.end_to_end.actors import Worker

FaultsOf: TypeAlias = Callable[..., list[MeshFailure]]


@pytest.fixture
def faults_of(monkeypatch: pytest.MonkeyPatch) -> FaultsOf:
    """Collects the unhandled faults of meshes by name.

    The hook is the process's: it also gets late faults of sessions that earlier tests on this process share.
    """

    def collect(*meshes: str) -> list[MeshFailure]:
        faults: list[MeshFailure] = []
        monkeypatch.setattr(
            kt, "unhandled_fault_hook", lambda failure: failure.mesh_name in meshes and faults.append(failure)
        )
        return faults

    return collect


@pytest.fixture(scope="session")
def shared_job() -> Iterator[ProcessJob]:
    with ProcessJob({"workers": 2}, env={SHARED_VARIABLE: "1"}) as job:
        job.apply()
        yield job


@pytest.fixture(scope="module")
def job(shared_job: ProcessJob) -> Iterator[ProcessJob]:
    """The shared job as another program finds it, with a session and processes of its own.

    A module that kills the gateway or a host, or that leaves something on a host, has a ``ProcessJob`` of its own.
    """
    job = job_loads(shared_job.dumps())
    assert isinstance(job, ProcessJob)
    yield job
    job._close_services()
    if job._client is not None:
        job._client.close()


@pytest.fixture(scope="module")
def job_of_its_own() -> Iterator[ProcessJob]:
    with ProcessJob({"workers": 2}) as job:
        job.apply()
        yield job


@pytest.fixture(scope="module")
def hosts(job: ProcessJob) -> Any:
    return job.state(cached_path=None).workers


@pytest.fixture(scope="module")
def procs(hosts: Any) -> Any:
    return hosts.spawn_procs(per_host={"gpus": 2})


@pytest.fixture(scope="module")
def workers(procs: Any) -> Any:
    return procs.spawn("workers", Worker)
