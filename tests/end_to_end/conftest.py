"""One gateway with two hosts for the tests of a module; each module has its own, so that they run side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from meshgate import ProcessJob
from tests.end_to_end.actors import Worker


@pytest.fixture(scope="module")
def job() -> Iterator[ProcessJob]:
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
