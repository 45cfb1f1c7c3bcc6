"""A gateway that makes jobs for others: what it refuses before anything is made, and whose the jobs are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import pytest
from pydantic import SecretStr
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

from meshgate_gateway import making
from meshgate_gateway.auth import TokenAuthenticator
from meshgate_gateway.kubernetes_auth import KubernetesUsers
from meshgate_gateway.policy import Policy
from meshgate_gateway.provisioning import Provisioner
from meshgate_gateway.server import Server, listen
from meshgate_kubernetes import provision, readiness
from meshgate_kubernetes.api import Api
from meshgate_kubernetes.errors import Unreachable
from meshgate_kubernetes.requests import Answer, Ask, Created, End, Ended, Find, Refused, Start, Told, Up, read_answer
from meshgate_kubernetes.spec import JobSpec
from tests.gateway.kubernetes.fake_api import FakeApi
from tests.gateway.kubernetes.objects import found_mesh, job, mesh, pod

T = TypeVar("T")
TOKEN = "correct-horse-battery-staple"
POLICY = Policy(
    callers=("alice", "trainers"),
    namespaces=("team",),
    images=("worker:",),
    gateway_image="gateway:operators",
    max_replicas=4,
    max_per_pod={"memory": "8Gi"},
    selectors=("app=mine",),
)
EVERY_KIND = [
    "ConfigMap", "Secret", "ServiceAccount", "Role", "RoleBinding", "NetworkPolicy", "Service", "Deployment",
    "NetworkPolicy", "Service", "StatefulSet",
]  # fmt: skip


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    """Alice and the trainers may ask; Bob and the stranger have rights of their own, or none."""
    monkeypatch.setattr(readiness, "HEARTBEAT", 0.05)
    api = FakeApi()
    api.users = {
        "alices": {"username": "alice"},
        "trainers": {"username": "carol", "groups": ["trainers"]},
        "bobs": {"username": "bob"},
        "strangers": {"username": "stranger"},
    }
    return api


def wanted(*, replicas: int = 2, idle_timeout: int = 60, **worker: Any) -> JobSpec:
    return job(mesh(replicas=replicas, **{"memory": "4Gi", **worker}), idle_timeout=idle_timeout)


@asynccontextmanager
async def gateway(api: FakeApi) -> AsyncIterator[str]:
    """The address of a gateway that provisions in ``api``."""
    seen = cast("Api", api)
    provisioner = Provisioner(seen, POLICY, TokenAuthenticator(SecretStr(TOKEN)), KubernetesUsers(seen))
    listener = listen("127.0.0.1", 0)
    server = Server([listener], lambda request, conn: provisioner.answer(urlsplit(request.path).path, request, conn))
    serving = asyncio.create_task(server.serve())
    try:
        yield f"ws://127.0.0.1:{listener.getsockname()[1]}/v1/jobs"
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await provisioner.close()
        await server.close()


def with_gateway(api: FakeApi, deed: Callable[[str], Awaitable[T]]) -> T:
    async def run() -> T:
        async with gateway(api) as url:
            return await asyncio.wait_for(deed(url), 20)

    return asyncio.run(run())


def calling(url: str, token: str) -> connect:
    return connect(url, additional_headers={"Authorization": f"Bearer {token}"}, proxy=None)


async def said(connection: ClientConnection) -> list[Answer]:
    return [read_answer(text) async for text in connection]


def ask(api: FakeApi, what: Ask | str, token: str = "alices") -> list[Answer]:
    """All that the gateway answers to one question."""

    async def deed(url: str) -> list[Answer]:
        async with calling(url, token) as connection:
            await connection.send(what if isinstance(what, str) else what.model_dump_json())
            return await said(connection)

    return with_gateway(api, deed)


def refusal(api: FakeApi, what: Ask | str, token: str = "alices") -> Refused:
    (answer,) = ask(api, what, token)
    assert isinstance(answer, Refused)
    return answer


# --- making ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["alices", "trainers", TOKEN])
def test_whom_the_policy_names_has_a_job_made_and_hears_how_it_goes(api: FakeApi, token: str) -> None:
    *told, up = ask(api, Start(job=wanted()), token)
    assert [each.kind for each in told if isinstance(each, Created)] == EVERY_KIND
    assert any(isinstance(each, Told) for each in told)
    assert isinstance(up, Up)
    assert (up.job.name, up.job.namespace, up.job.meshes) == ("trainer", "team", {"workers": 2})


def test_the_jobs_gateway_runs_the_operators_image_whatever_is_asked_for(api: FakeApi) -> None:
    ask(api, Start(job=wanted()))
    (container,) = api.get("Deployment", "trainer-gateway", "team")["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "gateway:operators"


def test_who_may_make_stateful_sets_needs_no_policy(api: FakeApi) -> None:
    api.rights = {("bob", "create", "statefulsets")}
    assert isinstance(ask(api, Start(job=wanted()), "bobs")[-1], Up)


def test_a_stranger_is_told_the_verb_and_nothing_is_made(api: FakeApi) -> None:
    told = refusal(api, Start(job=wanted()), "strangers").reason
    assert "stranger may not create statefulsets.apps in namespace 'team'" in told
    assert api.made == []


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (wanted().model_copy(update={"namespace": "kube-system"}), "namespace 'kube-system' is not among team"),
        (wanted(image="evil:1"), "image 'evil:1' does not begin with one of worker:"),
        (wanted(replicas=5), "5 pods are more than 4"),
        (wanted(memory="9Gi"), "9Gi of memory is more than 8Gi a pod"),
        (wanted(memory=None), "memory must be said"),
        (wanted(idle_timeout=0), "an idle timeout of never is longer than 86400 s"),
        (wanted(service_account_name="admin"), "service account 'admin' is not among (none)"),
        (wanted(pod_spec={"hostNetwork": True}), "a raw pod specification is not taken from others"),
    ],
)
@pytest.mark.parametrize("token", ["alices", TOKEN])
def test_what_the_policy_is_against_is_refused_before_anything_is_made(
    api: FakeApi, asked: JobSpec, told: str, token: str
) -> None:
    assert told in refusal(api, Start(job=asked), token).reason
    assert api.made == []


def test_a_right_of_ones_own_is_not_above_the_policys_limits(api: FakeApi) -> None:
    api.rights = {("bob", "create", "statefulsets")}
    assert "5 pods are more than 4" in refusal(api, Start(job=wanted(replicas=5)), "bobs").reason
    assert api.made == []


def test_more_existing_pods_than_the_policy_allows_are_refused_once_counted(api: FakeApi) -> None:
    for number in range(5):
        made = pod(f"mine-{number}")
        made["metadata"] |= {"namespace": "team", "labels": {"app": "mine"}}
        api.create(made)
    asked = job(found_mesh(replicas=0), idle_timeout=60)
    assert "5 pods are more than the 4 that the policy allows" in refusal(api, Start(job=asked)).reason
    assert api.made == ["Pod"] * 5


def test_the_pods_of_another_job_are_not_attached_to(api: FakeApi) -> None:
    ask(api, Start(job=wanted()))
    made = list(api.made)
    theft = job(found_mesh(selector="meshgate.dev/job=trainer"), name="thief", idle_timeout=60)
    assert "the pods of jobs are not lent to other jobs" in refusal(api, Start(job=theft), "trainers").reason
    assert api.made == made


def test_a_pod_of_a_job_is_not_found_by_another_label_that_it_has(api: FakeApi) -> None:
    victims = pod("victim-workers-0")
    victims["metadata"] |= {"namespace": "team", "labels": {"app": "mine", "meshgate.dev/job": "victim"}}
    api.create(victims)
    told = refusal(api, Start(job=job(found_mesh(replicas=0), idle_timeout=60))).reason
    assert "no pod in namespace 'team' matches" in told


@pytest.mark.parametrize("way", ["statefulset", "monarchmesh"])
def test_a_network_policy_opens_the_jobs_own_pods_whatever_selector_is_sent(api: FakeApi, way: str) -> None:
    foreign = {"way": way, "selector": "meshgate.dev/job=victim"}
    asked = wanted()
    asked = asked.model_copy(update={"meshes": (asked.meshes[0].model_copy(update=foreign),)})
    assert isinstance(ask(api, Start(job=asked))[-1], Up)
    opened = api.get("NetworkPolicy", "trainer-workers-workers", "team")["spec"]["podSelector"]
    assert opened == {"matchLabels": {"meshgate.dev/job": "trainer", "meshgate.dev/mesh": "workers"}}


def test_a_job_that_cannot_come_up_is_told_and_leaves_nothing(api: FakeApi) -> None:
    api.pods_come_up = False
    *_, answer = ask(api, Start(job=wanted(), timeout=0.3))
    assert isinstance(answer, Refused)
    assert "within 0.3 s; not ready: the gateway, trainer-workers-0, trainer-workers-1" in answer.reason
    assert api.left() == []


def test_a_fault_of_the_gateway_is_told_and_leaves_nothing(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(readiness._Waiter, "look", fail)
    *_, answer = ask(api, Start(job=wanted()))
    assert isinstance(answer, Refused)
    assert "the gateway failed inside: RuntimeError('a bug')" in answer.reason
    assert api.left() == []


def test_what_is_no_question_is_refused_by_its_place(api: FakeApi) -> None:
    assert "Input tag 'steal'" in refusal(api, '{"ask": "steal"}').reason
    spec = wanted().model_dump(mode="json") | {"privileged": True}
    assert "start.job.privileged: Extra inputs" in refusal(api, json.dumps({"ask": "start", "job": spec})).reason
    assert api.made == []


# --- using and ending -----------------------------------------------------------------------------------------


def test_who_asked_for_a_job_finds_and_ends_it_and_no_other_caller_does(api: FakeApi) -> None:
    up = ask(api, Start(job=wanted()))[-1]
    here = {"name": "trainer", "namespace": "team"}
    assert ask(api, Find(**here)) == [up]
    assert "carol may not get secrets in namespace 'team'" in refusal(api, Find(**here), "trainers").reason
    assert "carol may not delete statefulsets.apps" in refusal(api, End(**here), "trainers").reason
    assert ask(api, End(**here)) == [Ended()]
    assert api.left() == []
    assert refusal(api, Find(**here)).missing


def test_a_job_that_is_not_up_yet_is_ended_whole_as_well(api: FakeApi) -> None:
    provision.create_parent(cast("Api", api), wanted(), owner="kubernetes:alice")
    assert ask(api, End(name="trainer", namespace="team")) == [Ended()]
    assert api.left() == []


def test_rights_in_the_namespace_open_the_jobs_of_others(api: FakeApi) -> None:
    ask(api, Start(job=wanted()))
    api.rights = {("bob", "get", "secrets"), ("bob", "delete", "statefulsets")}
    assert isinstance(ask(api, Find(name="trainer", namespace="team"), "bobs")[0], Up)
    assert ask(api, End(name="trainer", namespace="team"), "bobs") == [Ended()]


def test_a_job_of_someone_else_is_not_taken_over_by_asking_for_the_same(api: FakeApi) -> None:
    ask(api, Start(job=wanted()))
    assert "a job 'trainer' runs already" in ask(api, Start(job=wanted()), "trainers")[-1].reason  # type: ignore[union-attr]


def test_an_identity_without_rights_is_not_told_which_jobs_there_are(api: FakeApi) -> None:
    ask(api, Start(job=wanted()))
    for question in (Find, End):
        there = refusal(api, question(name="trainer", namespace="team"), "strangers")
        assert refusal(api, question(name="missing", namespace="team"), "strangers") == there
        assert not there.missing


@pytest.mark.parametrize("where", [{"name": "a/../../secrets/b"}, {"namespace": "team/secrets/b/.."}])
def test_no_name_leads_out_of_its_place_in_the_api(api: FakeApi, where: dict[str, str]) -> None:
    question = {"ask": "find", "name": "trainer", "namespace": "team", **where}
    (field,) = where
    assert refusal(api, json.dumps(question)).reason.startswith(f"find.{field}: ")
    assert api.reads == 0


@pytest.mark.parametrize("name", ["the gateway's token", "token", "", "job"])
def test_no_name_of_an_identity_makes_it_the_holder_of_the_token(api: FakeApi, name: str) -> None:
    api.users["posers"] = {"username": name}
    ask(api, Start(job=wanted()), TOKEN)
    assert "may not create statefulsets" in refusal(api, Start(job=wanted()), "posers").reason
    assert "may not get secrets" in refusal(api, Find(name="trainer", namespace="team"), "posers").reason
    assert "may not delete statefulsets" in refusal(api, End(name="trainer", namespace="team"), "posers").reason


def test_an_identity_does_not_own_what_nobody_asked_a_gateway_for(api: FakeApi) -> None:
    provision.create_parent(cast("Api", api), wanted())
    told = refusal(api, End(name="trainer", namespace="team"), "alices").reason
    assert "alice may not delete statefulsets" in told


# --- at the door ----------------------------------------------------------------------------------------------


def status_at_the_door(api: FakeApi, token: str) -> tuple[int, str]:
    async def deed(url: str) -> tuple[int, str]:
        with pytest.raises(InvalidStatus) as caught:
            async with calling(url, token):
                pass
        return caught.value.response.status_code, (caught.value.response.body or b"").decode()

    return with_gateway(api, deed)


def test_a_token_that_nobody_has_does_not_get_to_ask(api: FakeApi) -> None:
    status, told = status_at_the_door(api, "nobodys")
    assert status == 401
    assert "or it has expired" in told


def test_a_cluster_that_is_away_is_told_as_a_thing_that_passes(api: FakeApi) -> None:
    api.down = Unreachable("the API server is away")
    status, told = status_at_the_door(api, "alices")
    assert status == 503
    assert "the API server is away" in told


# --- connections that are cut ---------------------------------------------------------------------------------


async def under_way(connection: ClientConnection, asked: JobSpec) -> None:
    """Asks, and returns when the job is being waited for."""
    await connection.send(Start(job=asked).model_dump_json())
    while not isinstance(read_answer(await connection.recv()), Told):
        continue


def test_pings_are_answered_while_a_job_comes_up(api: FakeApi) -> None:
    api.pods_come_up = False

    async def deed(url: str) -> None:
        async with calling(url, "alices") as connection:
            await under_way(connection, wanted())
            await (await connection.ping())
            api.bring_up()
            assert isinstance((await said(connection))[-1], Up)

    with_gateway(api, deed)


def test_a_caller_that_is_cut_off_asks_again_and_gets_the_same_job(api: FakeApi) -> None:
    api.pods_come_up = False

    async def deed(url: str) -> Answer:
        async with calling(url, "alices") as first:
            await under_way(first, wanted())
            first.transport.abort()
        async with calling(url, "alices") as second:
            await under_way(second, wanted())
            api.bring_up()
            return (await said(second))[-1]

    assert isinstance(with_gateway(api, deed), Up)
    assert api.made == EVERY_KIND


def test_a_job_that_came_up_while_its_caller_was_cut_off_is_kept_for_it(api: FakeApi) -> None:
    api.pods_come_up = False

    async def deed(url: str) -> Answer:
        async with calling(url, "alices") as first:
            await under_way(first, wanted())
            first.transport.abort()
        api.bring_up()
        async with calling(url, "alices") as second:
            await second.send(Start(job=wanted()).model_dump_json())
            return (await said(second))[-1]

    assert isinstance(with_gateway(api, deed), Up)
    assert ("ConfigMap", "team", "trainer") in api.left()


@pytest.mark.parametrize("says_goodbye", [True, False])
def test_a_job_is_not_made_for_nobody(api: FakeApi, says_goodbye: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    api.pods_come_up = False
    monkeypatch.setattr(making, "RETURN_TIME", 0.2)

    async def deed(url: str) -> None:
        async with calling(url, "alices") as connection:
            await under_way(connection, wanted())
            if not says_goodbye:
                connection.transport.abort()
        await asyncio.to_thread(api.wait_empty)

    with_gateway(api, deed)


def test_a_gateway_that_ends_takes_what_it_was_making_along(api: FakeApi) -> None:
    api.pods_come_up = False

    async def deed(url: str) -> ClientConnection:
        connection = await calling(url, "alices")
        await under_way(connection, wanted())
        return connection

    with_gateway(api, deed)
    assert api.left() == []
