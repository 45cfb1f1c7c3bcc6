"""Errors of the Kubernetes layer, as a driver sees them, and their advice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

from meshgate.errors import JobError, JobNotRunning, JobStartFailed
from meshgate.jobs.kubernetes.cluster import Cluster
from meshgate.jobs.kubernetes.compute import Compute
from meshgate.jobs.kubernetes.requests import JobRequest, mesh_from_compute
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import Unauthenticated
from meshgate_kubernetes.jobs.lifecycle import RunningJob
from tests.clusters.kubernetes.fake_api import FakeApi

REQUEST = JobRequest(name="trainer", namespace="team", meshes=(mesh_from_compute("workers", Compute()),))


class WithoutRights(FakeApi):
    def list_rules(self, namespace: str) -> list[dict[str, object]]:
        return []

    def is_allowed(self, attributes: Mapping[str, str]) -> bool:
        return False

    def denied_user(self, verb: str, kind: str, namespace: str) -> str:
        return "bob"


class WithoutPortForward(WithoutRights):
    def is_allowed(self, attributes: Mapping[str, str]) -> bool:
        return "subresource" not in attributes


def cluster(api: FakeApi, *, inside: bool = False, url: str | None = None) -> Cluster:
    return Cluster(cast("Api", api), inside=inside, url=url, ca=None)


@pytest.fixture(autouse=True)
def _silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHGATE_PROGRESS", "off")


def test_a_pod_without_rights_is_advised_to_use_a_provisioning_gateway() -> None:
    with pytest.raises(JobStartFailed, match=r"bob may not create configmaps in namespace 'team'.* set MESHGATE_URL"):
        cluster(WithoutRights(), inside=True).start(REQUEST)


def test_a_laptop_without_rights_is_advised_to_add_a_role() -> None:
    with pytest.raises(JobStartFailed) as caught:
        cluster(WithoutRights()).start(REQUEST)
    assert "docs/kubernetes.md has a Role with the required permissions" in str(caught.value)
    assert "MESHGATE_URL" not in str(caught.value)


def test_the_right_to_port_forward_is_checked_only_if_it_is_needed() -> None:
    with pytest.raises(JobStartFailed, match="may not get pods/portforward"):
        cluster(WithoutPortForward()).start(REQUEST)
    for other in (
        cluster(WithoutPortForward(), inside=True),
        cluster(WithoutPortForward(), url="wss://gateway.example"),
    ):
        other.end(other.start(REQUEST))


def test_a_missing_job_is_named_with_its_namespace() -> None:
    with pytest.raises(JobNotRunning, match="there is no job 'trainer' in namespace 'team'"):
        cluster(FakeApi()).find_job("trainer", "team")


class Expired(FakeApi):
    def delete(self, *what: Any, **how: Any) -> None:
        raise Unauthenticated("the API server does not accept the credentials")


def test_a_job_that_cannot_be_ended_is_named_with_the_command_to_end_it() -> None:
    job = RunningJob(name="trainer", namespace="team", uid="1", token="", meshes={"workers": 1})
    with pytest.raises(
        JobError, match=r"credentials\n.*may still be running; to end it, run `meshgate kill -n team trainer`"
    ):
        cluster(Expired()).end(job)
