"""Requests of callers: what is rejected, who may use and end jobs, and starts over connections that are cut."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any, NoReturn, cast

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

from meshgate_gateway.provisioning import service
from meshgate_gateway.provisioning.policy import Policy
from meshgate_gateway.provisioning.service import PendingJob, PendingJobs
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import KubernetesError, Unreachable
from meshgate_kubernetes.jobs import lifecycle, objects
from meshgate_kubernetes.jobs.provisioning_messages import (
    EndJob,
    FindJob,
    JobEnded,
    JobProgress,
    JobsListed,
    JobUp,
    ListJobs,
    ObjectCreated,
    RequestRejected,
    StartJob,
)
from meshgate_kubernetes.manifests.spec import JobSpec
from meshgate_kubernetes.status import readiness
from meshgate_wire.proof import ANY_GATEWAY, NONCE_HEADER, PROOF_HEADER, Prover, new_nonce
from tests.clusters.kubernetes.fake_api import FakeApi
from tests.clusters.kubernetes.objects import found_mesh, job, pod
from tests.gateway.captured_logs import capture_logs
from tests.gateway.provisioning.provisioning_gateway import (
    CREATED_KINDS,
    POLICY,
    TOKEN,
    dial,
    fake_api,
    provisioning_gateway,
    rejected,
    replies,
    request,
    requested_job,
    start_job,
    with_gateway,
)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    monkeypatch.setattr(readiness, "HEARTBEAT", 0.05)
    return fake_api()


# --- starting -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["alices", "trainers", TOKEN])
def test_an_allowed_caller_gets_a_job_and_progress_reports(api: FakeApi, token: str) -> None:
    *reports, up = request(api, StartJob(job=requested_job()), token)
    assert [each.kind for each in reports if isinstance(each, ObjectCreated)] == CREATED_KINDS
    assert any(isinstance(each, JobProgress) for each in reports)
    assert isinstance(up, JobUp)
    assert (up.job.name, up.job.namespace, up.job.meshes) == ("trainer", "team", {"workers": 2})


def test_the_jobs_gateway_runs_the_image_of_the_policy(api: FakeApi) -> None:
    request(api, StartJob(job=requested_job()))
    (container,) = api.get("Deployment", "trainer-gateway", "team")["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "gateway:operators"


def test_requests_are_recorded_with_the_caller_the_address_and_the_outcome(api: FakeApi) -> None:
    with capture_logs() as events:
        request(api, StartJob(job=requested_job()))
        rejected(api, StartJob(job=requested_job()), "strangers")
        rejected(api, EndJob(name="trainer", namespace="team"), "bobs")
    audited = [event for event in events if event["event"] == "audit"]
    assert [(each["action"], each["caller"], each["outcome"]) for each in audited] == [
        ("start job", "kubernetes:alice", "allowed"),
        ("start job", "kubernetes:stranger", "refused"),
        ("end job", "kubernetes:bob", "refused"),
    ]
    assert {(each["job"], each["namespace"], each["address"]) for each in audited} == {("trainer", "team", "127.0.0.1")}
    assert "may not create statefulsets" in audited[1]["reason"]


def test_a_caller_with_permission_to_create_statefulsets_needs_no_policy_entry(api: FakeApi) -> None:
    api.permissions = {("bob", "create", "statefulsets")}
    assert isinstance(request(api, StartJob(job=requested_job()), "bobs")[-1], JobUp)


def test_a_caller_without_permission_gets_the_missing_verb_and_nothing_is_created(api: FakeApi) -> None:
    reason = rejected(api, StartJob(job=requested_job()), "strangers").reason
    assert "stranger may not create statefulsets.apps in namespace 'team'" in reason
    assert api.made == []


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (
            requested_job().model_copy(update={"namespace": "kube-system"}),
            "namespace 'kube-system' is not allowed (allowed: team)",
        ),
        (requested_job(image="evil:1"), "image 'evil:1' is not allowed (allowed prefixes: worker:)"),
        (requested_job(replicas=5), "5 pods exceed the limit of 4"),
        (requested_job(memory="9Gi"), "9Gi of memory exceeds the limit of 8Gi per pod"),
        (requested_job(memory=None), "memory must be set"),
        (requested_job(idle_timeout=0), "idle_timeout 0 (never) exceeds the limit of 86400 s"),
        (requested_job(service_account_name="admin"), "service account 'admin' is not allowed (allowed: none)"),
        (requested_job(pod_spec={"hostNetwork": True}), "a raw pod specification (pod_spec) is not allowed"),
    ],
)
@pytest.mark.parametrize("token", ["alices", TOKEN])
def test_a_policy_violation_is_rejected_before_anything_is_created(
    api: FakeApi, spec: JobSpec, reason: str, token: str
) -> None:
    assert reason in rejected(api, StartJob(job=spec), token).reason
    assert api.made == []


def test_own_permissions_do_not_override_the_limits_of_the_policy(api: FakeApi) -> None:
    api.permissions = {("bob", "create", "statefulsets")}
    assert "5 pods exceed the limit of 4" in rejected(api, StartJob(job=requested_job(replicas=5)), "bobs").reason
    assert api.made == []


def test_a_selector_that_matches_too_many_pods_is_rejected(api: FakeApi) -> None:
    for number in range(5):
        made = pod(f"mine-{number}")
        made["metadata"] |= {"namespace": "team", "labels": {"app": "mine"}}
        api.create(made)
    spec = job(found_mesh(replicas=0), idle_timeout=60)
    assert "5 pods exceed the policy's limit of 4" in rejected(api, StartJob(job=spec)).reason
    assert api.made == ["Pod"] * 5


def test_jobs_beyond_the_limit_of_a_caller_are_rejected_until_one_ends(api: FakeApi) -> None:
    one = POLICY.model_copy(update={"max_jobs_per_caller": 1})
    second = requested_job().model_copy(update={"name": "second"})
    assert isinstance(request(api, StartJob(job=requested_job()), policy=one)[-1], JobUp)
    made = list(api.made)
    *_, refused = request(api, StartJob(job=second), policy=one)
    assert isinstance(refused, RequestRejected)
    assert "kubernetes:alice has team/trainer, and the limit per caller is 1 job" in refused.reason
    assert api.made == made
    assert isinstance(request(api, StartJob(job=requested_job()), policy=one)[-1], JobUp)  # the same job again
    other = second.model_copy(update={"name": "third"})
    assert isinstance(request(api, StartJob(job=other), "trainers", policy=one)[-1], JobUp)
    request(api, EndJob(name="trainer", namespace="team"), policy=one)
    assert isinstance(request(api, StartJob(job=second), policy=one)[-1], JobUp)


def test_jobs_of_a_caller_that_start_at_once_cannot_exceed_the_limit_together(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = POLICY.model_copy(update={"max_jobs_per_caller": 1})
    rival = requested_job().model_copy(update={"name": "rival"})
    create = objects.create_parent

    def create_both(*arguments: Any) -> Any:
        monkeypatch.setattr(objects, "create_parent", create)
        create(cast("Api", api), rival, owner="kubernetes:alice")  # after the first check
        return create(*arguments)

    monkeypatch.setattr(objects, "create_parent", create_both)
    *_, refused = request(api, StartJob(job=requested_job()), policy=one)
    assert isinstance(refused, RequestRejected)
    assert "team/rival" in refused.reason
    assert api.left() == [("ConfigMap", "team", "rival")]


def test_a_job_cannot_select_the_pods_of_another_job(api: FakeApi) -> None:
    request(api, StartJob(job=requested_job()))
    made = list(api.made)
    theft = job(found_mesh(selector="meshgate.dev/job=trainer"), name="thief", idle_timeout=60)
    assert "a job cannot use the pods of another job" in rejected(api, StartJob(job=theft), "trainers").reason
    assert api.made == made


def test_a_selector_does_not_match_pods_of_jobs_by_their_other_labels(api: FakeApi) -> None:
    victims = pod("victim-workers-0")
    victims["metadata"] |= {"namespace": "team", "labels": {"app": "mine", "meshgate.dev/job": "victim"}}
    api.create(victims)
    reason = rejected(api, StartJob(job=job(found_mesh(replicas=0), idle_timeout=60))).reason
    assert "no pod in namespace 'team' matches" in reason


@pytest.mark.parametrize("way", ["statefulset", "monarchmesh"])
def test_a_network_policy_covers_only_the_jobs_own_pods_whatever_the_selector(api: FakeApi, way: str) -> None:
    foreign = {"way": way, "selector": "meshgate.dev/job=victim"}
    spec = requested_job()
    spec = spec.model_copy(update={"meshes": (spec.meshes[0].model_copy(update=foreign),)})
    assert isinstance(request(api, StartJob(job=spec))[-1], JobUp)
    opened = api.get("NetworkPolicy", "trainer-workers-workers", "team")["spec"]["podSelector"]
    assert opened == {"matchLabels": {"meshgate.dev/job": "trainer", "meshgate.dev/mesh": "workers"}}


def test_a_job_that_does_not_become_ready_is_rejected_and_leaves_nothing(api: FakeApi) -> None:
    api.pods_come_up = False
    *_, answer = request(api, StartJob(job=requested_job(), timeout=3))
    assert isinstance(answer, RequestRejected)
    assert "within 3 s; not ready: the gateway, trainer-workers-0, trainer-workers-1" in answer.reason
    assert api.left() == []


def test_an_internal_error_is_reported_and_leaves_nothing(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(readiness._Tracker, "update", fail)
    *_, answer = request(api, StartJob(job=requested_job()))
    assert isinstance(answer, RequestRejected)
    assert "internal error in the gateway: RuntimeError('a bug')" in answer.reason
    assert api.left() == []


def test_an_invalid_request_is_rejected_with_the_field(api: FakeApi) -> None:
    assert "Input tag 'steal'" in rejected(api, '{"ask": "steal"}').reason
    spec = requested_job().model_dump(mode="json") | {"privileged": True}
    assert "start.job.privileged: Extra inputs" in rejected(api, json.dumps({"ask": "start", "job": spec})).reason
    assert api.made == []


# --- using and ending -----------------------------------------------------------------------------------------


def test_only_the_owner_of_a_job_finds_and_ends_it(api: FakeApi) -> None:
    up = request(api, StartJob(job=requested_job()))[-1]
    here = {"name": "trainer", "namespace": "team"}
    assert request(api, FindJob(**here)) == [up]
    belongs = "job 'trainer' in namespace 'team' belongs to kubernetes:alice, and carol may not "
    assert f"{belongs}create pods/exec in namespace 'team'" in rejected(api, FindJob(**here), "trainers").reason
    assert f"{belongs}delete statefulsets.apps" in rejected(api, EndJob(**here), "trainers").reason
    assert request(api, EndJob(**here)) == [JobEnded()]
    assert api.left() == []
    gone = rejected(api, FindJob(**here))
    assert (gone.missing, gone.reason) == (True, "there is no job 'trainer' in namespace 'team' (it may have ended)")


def other_job(api: FakeApi, owner: str) -> str:
    """The uid of a new job ``trainer`` of ``owner``."""
    return str(objects.create_parent(cast("Api", api), requested_job(), owner=owner)["metadata"]["uid"])


@pytest.mark.parametrize("token", ["alices", TOKEN])
def test_a_request_to_end_a_job_does_not_end_a_later_one_of_its_name(api: FakeApi, token: str) -> None:
    earlier = other_job(api, "kubernetes:alice")
    here = {"name": "trainer", "namespace": "team"}
    assert request(api, EndJob(**here, uid=earlier), token) == [JobEnded()]
    for owner in ("kubernetes:alice", "kubernetes:carol"):
        later = other_job(api, owner)
        gone = rejected(api, EndJob(**here, uid=earlier), token)
        assert (gone.missing, gone.reason) == (
            True,
            "job 'trainer' in namespace 'team' has ended, and another job has its name now",
        )
        assert api.get("ConfigMap", "trainer", "team")["metadata"]["uid"] == later
        assert request(api, EndJob(**here, uid=later), TOKEN) == [JobEnded()]


def test_a_job_that_is_replaced_while_its_end_is_requested_stays(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier, delete = other_job(api, "kubernetes:alice"), objects.delete

    def replace_and_delete(*job: Any, **how: Any) -> None:
        api.drop_alone("ConfigMap", "trainer", "team")
        other_job(api, "kubernetes:carol")
        delete(*job, **how)

    monkeypatch.setattr(objects, "delete", replace_and_delete)
    assert request(api, EndJob(name="trainer", namespace="team", uid=earlier)) == [JobEnded()]
    assert api.left() == [("ConfigMap", "team", "trainer")]


def test_a_config_map_that_is_not_that_of_a_job_is_not_deleted(api: FakeApi) -> None:
    api.create({"kind": "ConfigMap", "metadata": {"name": "settings", "namespace": "team"}})
    assert rejected(api, EndJob(name="settings", namespace="team"), TOKEN).missing
    assert api.left() == [("ConfigMap", "team", "settings")]


@pytest.mark.parametrize("token", ["alices", TOKEN])
def test_no_caller_gets_the_token_of_a_job(api: FakeApi, token: str) -> None:
    up = request(api, StartJob(job=requested_job()), token)[-1]
    found = request(api, FindJob(name="trainer", namespace="team"), token)[-1]
    assert isinstance(up, JobUp)
    assert isinstance(found, JobUp)
    assert (up.job.token, found.job.token) == ("", "")


def listed(api: FakeApi, token: str, namespace: str | None = "team", policy: Policy = POLICY) -> list[str]:
    (reply,) = request(api, ListJobs(namespace=namespace), token, policy)
    assert isinstance(reply, JobsListed)
    assert not reply.more
    return [job.name for job in reply.jobs]


def test_callers_list_the_jobs_that_they_may_use(api: FakeApi) -> None:
    api.permissions = {("bob", "create", "pods/exec")}
    for name, token in (("alices-job", "alices"), ("carols-job", "trainers"), ("operators-job", TOKEN)):
        request(api, StartJob(job=requested_job().model_copy(update={"name": name})), token)
    for namespace in ("team", None):
        assert listed(api, "alices", namespace) == ["alices-job"]
        assert listed(api, "trainers", namespace) == ["carols-job"]
        assert listed(api, "strangers", namespace) == []
        assert listed(api, "bobs", namespace) == listed(api, TOKEN, namespace)
    assert sorted(listed(api, TOKEN)) == ["alices-job", "carols-job", "operators-job"]
    assert listed(api, "alices", "elsewhere") == []


def test_a_long_list_of_jobs_comes_in_parts(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LISTED_TOGETHER", 2)
    names = ["a", "b", "c"]
    for name in names:
        request(api, StartJob(job=requested_job().model_copy(update={"name": name})))
    first, second = request(api, ListJobs())
    assert isinstance(first, JobsListed)
    assert isinstance(second, JobsListed)
    assert (first.more, second.more) == (True, False)
    assert sorted(job.name for job in (*first.jobs, *second.jobs)) == names


SHARING = POLICY.model_copy(update={"sharing_groups": ("trainers", "wheel")})


def test_members_of_a_group_that_the_policy_names_use_and_end_each_others_jobs(api: FakeApi) -> None:
    api.users["daves"] = {"username": "dave", "groups": ["trainers", "others"]}
    request(api, StartJob(job=requested_job()), "trainers", SHARING)
    here = {"name": "trainer", "namespace": "team"}
    assert listed(api, "daves", policy=SHARING) == ["trainer"]
    assert isinstance(request(api, FindJob(**here), "daves", SHARING)[0], JobUp)
    for policy, token in ((SHARING, "alices"), (POLICY, "daves")):  # no member; the policy names the group no more
        (reply,) = request(api, FindJob(**here), token, policy)
        assert isinstance(reply, RequestRejected)
        assert "belongs to kubernetes:carol" in reply.reason
    assert request(api, EndJob(**here), "daves", SHARING) == [JobEnded()]


def test_a_job_is_not_shared_with_a_group_that_was_named_later(api: FakeApi) -> None:
    request(api, StartJob(job=requested_job()), "trainers")
    assert listed(api, "trainers", policy=SHARING) == ["trainer"]
    api.users["daves"] = {"username": "dave", "groups": ["trainers"]}
    assert listed(api, "daves", policy=SHARING) == []


def test_a_caller_that_the_policy_names_no_more_cannot_use_its_own_job(api: FakeApi) -> None:
    request(api, StartJob(job=requested_job()))
    revoked = POLICY.model_copy(update={"callers": ("trainers",)})
    (reply,) = request(api, FindJob(name="trainer", namespace="team"), policy=revoked)
    assert isinstance(reply, RequestRejected)
    assert "alice may not create pods/exec" in reply.reason
    assert "belongs" not in reply.reason
    assert listed(api, "alices", policy=revoked) == []


def test_a_job_that_is_not_ready_can_be_ended(api: FakeApi) -> None:
    objects.create_parent(cast("Api", api), requested_job(), owner="kubernetes:alice")
    assert request(api, EndJob(name="trainer", namespace="team")) == [JobEnded()]
    assert api.left() == []


def test_permissions_in_the_namespace_give_access_to_the_jobs_of_others(api: FakeApi) -> None:
    request(api, StartJob(job=requested_job()))
    api.permissions = {("bob", "create", "pods/exec"), ("bob", "delete", "statefulsets")}
    assert isinstance(request(api, FindJob(name="trainer", namespace="team"), "bobs")[0], JobUp)
    assert request(api, EndJob(name="trainer", namespace="team"), "bobs") == [JobEnded()]


def test_requesting_the_job_of_another_owner_is_rejected(api: FakeApi) -> None:
    request(api, StartJob(job=requested_job()))
    *_, reply = request(api, StartJob(job=requested_job()), "trainers")
    assert isinstance(reply, RequestRejected)
    assert "a job 'trainer' of kubernetes:alice is already running in namespace 'team'" in reply.reason


def test_a_caller_without_permission_cannot_find_out_which_jobs_exist(api: FakeApi) -> None:
    request(api, StartJob(job=requested_job()))
    for question in (FindJob, EndJob):
        there = rejected(api, question(name="trainer", namespace="team"), "strangers")
        assert rejected(api, question(name="missing", namespace="team"), "strangers") == there
        assert not there.missing


@pytest.mark.parametrize("where", [{"name": "a/../../secrets/b"}, {"namespace": "team/secrets/b/.."}])
def test_a_name_cannot_change_the_api_path(api: FakeApi, where: dict[str, str]) -> None:
    question = {"ask": "find", "name": "trainer", "namespace": "team", **where}
    (field,) = where
    assert rejected(api, json.dumps(question)).reason.startswith(f"find.{field}: ")
    assert api.reads == 0


@pytest.mark.parametrize("name", ["the gateway's token", "token", "", "job"])
def test_no_identity_name_passes_for_the_token_holder(api: FakeApi, name: str) -> None:
    api.users["posers"] = {"username": name}
    request(api, StartJob(job=requested_job()), TOKEN)
    assert "may not create statefulsets" in rejected(api, StartJob(job=requested_job()), "posers").reason
    assert "may not create pods/exec" in rejected(api, FindJob(name="trainer", namespace="team"), "posers").reason
    assert "may not delete statefulsets" in rejected(api, EndJob(name="trainer", namespace="team"), "posers").reason


def test_an_identity_does_not_own_a_job_without_an_owner(api: FakeApi) -> None:
    objects.create_parent(cast("Api", api), requested_job())
    reason = rejected(api, EndJob(name="trainer", namespace="team"), "alices").reason
    assert "was created with a kubeconfig, and alice may not delete statefulsets" in reason


# --- authentication -------------------------------------------------------------------------------------------


def failed_handshake(api: FakeApi, token: str) -> tuple[int, str]:
    async def test(url: str) -> tuple[int, str]:
        with pytest.raises(InvalidStatus) as caught:
            async with dial(url, token):
                pass
        return caught.value.response.status_code, (caught.value.response.body or b"").decode()

    return with_gateway(api, test)


def test_an_unknown_token_fails_the_handshake(api: FakeApi) -> None:
    status, error = failed_handshake(api, "unknown")
    assert status == 401
    assert "it may have expired" in error


async def test_an_answer_in_place_of_a_jobs_gateway_is_proven_for_any_gateway(api: FakeApi) -> None:
    """Whoever is connected to a session knows the name of the job's gateway, and not that of this one."""
    prover = Prover.of_request(nonce := new_nonce(), "alices")
    assert prover is not None
    async with provisioning_gateway(api) as url:
        headers = {"Authorization": "Bearer alices", NONCE_HEADER: nonce}
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"{url}/team/missing/v1/sessions/one", additional_headers=headers, proxy=None)
        response = refused.value.response
        body = bytes(response.body or b"")
        assert prover.prover_of(response.headers[PROOF_HEADER], response.status_code, body) == ANY_GATEWAY


def test_an_unavailable_api_server_is_a_temporary_error(api: FakeApi) -> None:
    api.down = Unreachable("the API server is away")
    status, error = failed_handshake(api, "alices")
    assert status == 503
    assert "the API server is away" in error


async def test_pings_are_answered_while_a_job_starts(api: FakeApi) -> None:
    api.pods_come_up = False
    async with provisioning_gateway(api) as url, dial(url, "alices") as connection:
        await start_job(connection, requested_job())
        await (await connection.ping())
        api.bring_up()
        assert isinstance((await replies(connection))[-1], JobUp)


async def test_a_caller_that_reconnects_and_repeats_its_request_gets_the_same_job(api: FakeApi) -> None:
    api.pods_come_up = False
    async with provisioning_gateway(api) as url:
        async with dial(url, "alices") as first:
            await start_job(first, requested_job())
            first.transport.abort()
        async with dial(url, "alices") as second:
            await start_job(second, requested_job())
            api.bring_up()
            assert isinstance((await replies(second))[-1], JobUp)
    assert api.made == CREATED_KINDS


async def test_a_job_that_became_ready_while_its_caller_was_disconnected_is_kept(api: FakeApi) -> None:
    api.pods_come_up = False
    async with provisioning_gateway(api) as url:
        async with dial(url, "alices") as first:
            await start_job(first, requested_job())
            first.transport.abort()
        api.bring_up()
        async with dial(url, "alices") as second:
            await second.send(StartJob(job=requested_job()).model_dump_json())
            assert isinstance((await replies(second))[-1], JobUp)
    assert ("ConfigMap", "team", "trainer") in api.left()


@pytest.mark.parametrize("closes", [True, False])
async def test_a_job_is_deleted_if_its_caller_closes_or_does_not_return(
    api: FakeApi, closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.pods_come_up = False
    monkeypatch.setattr(service, "RECONNECT_TIMEOUT", 0.2)
    async with provisioning_gateway(api) as url:
        async with dial(url, "alices") as connection:
            await start_job(connection, requested_job())
            if not closes:
                connection.transport.abort()
        await asyncio.to_thread(api.wait_empty)


async def test_closing_the_gateway_deletes_pending_jobs(api: FakeApi) -> None:
    api.pods_come_up = False
    async with provisioning_gateway(api) as url:
        connection = await dial(url, "alices")
        await start_job(connection, requested_job())
    assert api.left() == []
    await connection.close()


@pytest.mark.parametrize("existed", [True, False])
def test_an_abandoned_request_deletes_only_a_job_that_it_created(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, existed: bool
) -> None:
    if existed:
        request(api, StartJob(job=requested_job()))
    ready, abandoned = threading.Event(), threading.Event()
    find, abandon = lifecycle.find, PendingJob.abandon

    def find_once_abandoned(*arguments: Any) -> Any:
        ready.set()
        assert abandoned.wait(20)
        return find(*arguments)

    def say_abandoned(pending: PendingJob) -> asyncio.Task[None]:
        deleting = abandon(pending)
        abandoned.set()
        return deleting

    monkeypatch.setattr(lifecycle, "find", find_once_abandoned)
    monkeypatch.setattr(PendingJob, "abandon", say_abandoned)

    async def test(url: str) -> ClientConnection:
        connection = await dial(url, "alices")
        await connection.send(StartJob(job=requested_job()).model_dump_json())
        assert await asyncio.to_thread(ready.wait, 20)
        return connection

    with_gateway(api, test)
    assert (("ConfigMap", "team", "trainer") in api.left()) is existed


async def test_a_caller_that_is_back_has_no_time_limit() -> None:
    class Connection:
        """A connection that ends when ``cut`` is set."""

        closed_by_peer = False

        def __init__(self) -> None:
            self.cut = asyncio.Event()

        async def wait_closed(self) -> None:
            await self.cut.wait()

        async def send(self, text: str) -> bool:
            return not self.cut.is_set()

    released = threading.Event()

    def start(progress: object) -> NoReturn:
        released.wait()
        raise KubernetesError("released")

    jobs = PendingJobs(lambda job: None)
    job = jobs.get_or_start(("alice", "trainer"), start)
    first, second = Connection(), Connection()
    first.cut.set()
    await job.follow(first)  # type: ignore[arg-type]
    limit = job._abandon_timer
    following = asyncio.create_task(job.follow(second))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    cancelled = limit is not None and limit.cancelled()
    released.set()
    await following
    await jobs.close()
    assert cancelled
