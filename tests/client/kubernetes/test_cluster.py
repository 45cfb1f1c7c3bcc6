"""A cluster as a driver sees it: what the errors of the layer below become, and what they say to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

from meshgate.errors import JobError, JobNotRunning, JobStartFailed
from meshgate.jobs.compute import Compute
from meshgate.kubernetes.asked import JobAsked, mesh_of_compute
from meshgate.kubernetes.cluster import Cluster
from meshgate_kubernetes.api import Api
from meshgate_kubernetes.errors import Unauthenticated
from meshgate_kubernetes.jobs import RunningJob
from tests.gateway.kubernetes.fake_api import FakeApi

ASKED = JobAsked(name="trainer", namespace="team", meshes=(mesh_of_compute("workers", Compute()),))


class WithoutRights(FakeApi):
    def rules(self, namespace: str) -> list[dict[str, object]]:
        return []

    def may(self, deed: Mapping[str, str]) -> bool:
        return False

    def user_who_may_not(self, verb: str, kind: str, namespace: str) -> str:
        return "bob"


class WithoutPortForward(WithoutRights):
    def may(self, deed: Mapping[str, str]) -> bool:
        return "subresource" not in deed


def cluster(api: FakeApi, *, inside: bool = False, url: str | None = None) -> Cluster:
    return Cluster(cast("Api", api), inside=inside, url=url, ca=None)


@pytest.fixture(autouse=True)
def _silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHGATE_PROGRESS", "off")


def test_a_pod_without_rights_is_told_of_the_gateway_that_makes_jobs_for_others() -> None:
    with pytest.raises(JobStartFailed, match=r"bob may not create configmaps in namespace 'team'.* set MESHGATE_URL"):
        cluster(WithoutRights(), inside=True).start(ASKED)


def test_a_laptop_without_rights_is_told_of_the_role() -> None:
    with pytest.raises(JobStartFailed) as caught:
        cluster(WithoutRights()).start(ASKED)
    assert "docs/kubernetes.md has a Role that suffices" in str(caught.value)
    assert "MESHGATE_URL" not in str(caught.value)


def test_a_port_forward_is_only_asked_for_where_it_is_needed() -> None:
    with pytest.raises(JobStartFailed, match="may not get pods/portforward"):
        cluster(WithoutPortForward()).start(ASKED)
    for other in (
        cluster(WithoutPortForward(), inside=True),
        cluster(WithoutPortForward(), url="wss://gateway.example"),
    ):
        other.end(other.start(ASKED))


def test_a_job_that_is_gone_is_named_with_its_namespace() -> None:
    with pytest.raises(JobNotRunning, match="there is no job 'trainer' in namespace 'team'"):
        cluster(FakeApi()).find_job("trainer", "team")


class Expired(FakeApi):
    def delete(self, *what: Any, **how: Any) -> None:
        raise Unauthenticated("the API server does not accept the credentials")


def test_a_job_that_cannot_be_ended_is_named_with_the_way_to_end_it() -> None:
    job = RunningJob(name="trainer", namespace="team", uid="1", token="", meshes={"workers": 1})
    with pytest.raises(JobError, match=r"credentials\n.*may be there still: `meshgate kill -n team trainer` ends it"):
        cluster(Expired()).end(job)
