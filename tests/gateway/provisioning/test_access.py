"""The rule for using and ending jobs, without connections."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, cast

import pytest
from pydantic import SecretStr

from meshgate_gateway.http.auth import Denied, TokenAuthenticator
from meshgate_gateway.http.kubernetes_auth import KubernetesUser, KubernetesUsers
from meshgate_gateway.provisioning.access import END, USE, Access, TokenHolder
from meshgate_gateway.provisioning.policy import Policy
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import Forbidden, NotFound, Unreachable
from meshgate_kubernetes.jobs import lifecycle
from meshgate_kubernetes.manifests.job_objects import GROUPS_ANNOTATION, parent
from tests.clusters.kubernetes.fake_api import FakeApi
from tests.clusters.kubernetes.objects import job

POLICY = Policy(callers=("alice", "team"), sharing_groups=("te*",), namespaces=("team",), gateway_image="gateway:1")
ALICE, BOB = (KubernetesUser(name, (), {"username": name}) for name in ("alice", "bob"))
CAROL, DAVE = (KubernetesUser(name, ("team", "all"), {"username": name}) for name in ("carol", "dave"))


@pytest.fixture
def api() -> FakeApi:
    """With a job of Carol's, who has shared it with her group."""
    api = FakeApi()
    api.create(parent(job(), "kubernetes:carol", groups=["team"]))
    return api


def access_to(api: FakeApi) -> Access:
    seen = cast("Api", api)
    return Access(seen, POLICY, TokenAuthenticator(SecretStr("operator")), KubernetesUsers(seen))


def why_not(api: FakeApi, caller: KubernetesUser | TokenHolder, name: str = "trainer", end: bool = False) -> str:
    """The reason; "" for a caller with access."""
    denied: Denied | None = asyncio.run(access_to(api).why_not(caller, name, "team", END if end else USE))
    return "" if denied is None else denied.reason


@pytest.mark.parametrize("end", [False, True])
def test_the_owner_its_group_and_the_operator_have_access(api: FakeApi, end: bool) -> None:
    for caller in (CAROL, DAVE, TokenHolder()):
        assert why_not(api, caller, end=end) == ""
        with pytest.raises(NotFound, match="there is no job 'missing' in namespace 'team'"):
            why_not(api, caller, "missing")


@pytest.mark.parametrize(("end", "verb"), [(False, "create pods/exec"), (True, "delete statefulsets.apps")])
def test_other_callers_of_the_policy_read_whose_it_is(api: FakeApi, end: bool, verb: str) -> None:
    assert f"belongs to kubernetes:carol, and alice may not {verb}" in why_not(api, ALICE, end=end)
    with pytest.raises(NotFound):
        why_not(api, ALICE, "missing", end=end)


def test_a_caller_that_may_create_nothing_there_reads_the_same_of_a_job_that_does_not_exist(api: FakeApi) -> None:
    assert why_not(api, BOB) == why_not(api, BOB, "missing")
    assert "carol" not in why_not(api, BOB)


def test_only_callers_that_may_know_read_that_the_gateway_may_not_read_a_namespace(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    denied = why_not(api, BOB)

    def refuse(*_: object) -> None:
        raise Forbidden("get", "configmaps", "team", user="the gateway")

    monkeypatch.setattr(lifecycle, "read_listed", refuse)
    assert why_not(api, BOB) == denied
    for caller in (ALICE, TokenHolder()):
        with pytest.raises(Forbidden, match="the gateway may not get configmaps"):
            why_not(api, caller)


def test_permission_to_exec_into_pods_gives_use_and_not_the_end(api: FakeApi) -> None:
    api.permissions = {("bob", "create", "pods/exec")}
    assert why_not(api, BOB) == ""
    assert "bob may not delete statefulsets.apps" in why_not(api, BOB, end=True)
    with pytest.raises(NotFound):
        why_not(api, BOB, "missing")


@pytest.mark.parametrize("text", ["not json", "{}", '"team"'])
def test_an_edited_list_of_groups_shares_the_job_with_none(api: FakeApi, text: str) -> None:
    api.get("ConfigMap", "trainer", "team")["metadata"]["annotations"][GROUPS_ANNOTATION] = text
    assert "belongs to kubernetes:carol" in why_not(api, DAVE)


def test_a_permission_that_cannot_be_checked_now_does_not_count_as_missing(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.create(parent(job(name="bobs"), "kubernetes:bob"))
    api.permissions = {("bob", "create", "statefulsets")}
    access, jobs = access_to(api), lifecycle.list_jobs(cast("Api", api), "team")
    failing, review = [""], api.is_user_allowed

    def review_or_fail(user: Mapping[str, Any], attributes: Mapping[str, str]) -> bool:
        if attributes["resource"] in failing:
            raise Unreachable("no answer")
        return review(user, attributes)

    monkeypatch.setattr(api, "is_user_allowed", review_or_fail)
    assert asyncio.run(access.why_not(BOB, "bobs", "team", USE)) is None
    assert [each.name for each in asyncio.run(access.usable(BOB, jobs))] == ["bobs"]
    reason = "the API server cannot check what bob may do now: no answer"
    for failing[0] in ("pods", "statefulsets"):
        with pytest.raises(Unreachable, match=reason):
            asyncio.run(access.usable(BOB, jobs))
    denied = asyncio.run(access.why_not(BOB, "bobs", "team", USE))
    assert denied == Denied(reason, HTTPStatus.SERVICE_UNAVAILABLE)
    assert asyncio.run(access.why_not_create(BOB, "team")) == reason
