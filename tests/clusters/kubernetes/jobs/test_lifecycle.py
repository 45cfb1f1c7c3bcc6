"""A job is created completely or not at all, despite interruptions and concurrent programs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest

from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import Conflict, Forbidden, NotFound, Rejected, Unreachable
from meshgate_kubernetes.jobs import lifecycle, objects
from meshgate_kubernetes.jobs.lifecycle import (
    GatewayPod,
    Permission,
    RunningJob,
    find_engines,
    find_gateway,
    gateway_gone_reason,
    require_permissions,
    required_permissions,
)
from meshgate_kubernetes.manifests.job_objects import SPEC_KEY
from meshgate_kubernetes.manifests.spec import GatewaySpec, JobSpec
from meshgate_kubernetes.status import readiness
from meshgate_kubernetes.status.readiness import JobNotReady
from tests.clusters.kubernetes.fake_api import FakeApi, IgnoreProgress
from tests.clusters.kubernetes.objects import Object, found_mesh, job, mesh
from tests.waiting import DEADLINE

POD = "trainer-gateway-0"


class InterruptedAfter(IgnoreProgress):
    """Raises KeyboardInterrupt when object ``number`` is created."""

    def __init__(self, number: int) -> None:
        self._left = number

    def created(self, obj: Object) -> None:
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def _short_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "HEARTBEAT", 0.05)


def start(api: FakeApi, spec: JobSpec | None = None, listener: Any = None, timeout: float | None = 10) -> RunningJob:
    return lifecycle.start(cast("Api", api), spec or job(), listener or IgnoreProgress(), timeout=timeout)


def test_a_started_job_is_found_with_its_token() -> None:
    api = FakeApi()
    started = start(api)
    assert len(started.token) >= 32
    assert lifecycle.find(cast("Api", api), "trainer", "team") == started


def test_a_busy_api_server_neither_ends_a_start_nor_leaves_objects_of_a_failed_one() -> None:
    api = FakeApi()
    lifecycle.end(cast("Api", api), start(api))
    with pytest.raises(KeyboardInterrupt):
        start(api, listener=InterruptedAfter(2))
    assert api.impatient == []


def test_the_caller_can_use_the_time_in_which_pods_start() -> None:
    api = FakeApi()
    api.pods_come_up = False
    made: list[str] = []

    def meanwhile() -> None:
        made.extend(api.made)
        api.bring_up()

    lifecycle.start(cast("Api", api), job(), IgnoreProgress(), timeout=10, meanwhile=meanwhile)
    assert made == api.made


@pytest.mark.parametrize("number", [1, 2, 5, 10])
def test_an_interruption_at_any_point_leaves_nothing(number: int) -> None:
    api = FakeApi()
    with pytest.raises(KeyboardInterrupt):
        start(api, listener=InterruptedAfter(number))
    assert api.left() == []


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), Unreachable("no response"), Rejected("no response")])
def test_an_interrupted_first_request_leaves_nothing_even_if_the_server_executed_it(
    interruption: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = FakeApi()
    create = api.create

    def create_then_fail(obj: Object) -> Object:
        create(obj)
        raise interruption

    monkeypatch.setattr(api, "create", create_then_fail)
    with pytest.raises(type(interruption)):
        start(api)
    assert api.left() == []


def test_a_job_whose_first_request_was_repeated_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection broke after the API server had executed the request, and the second one found its object."""
    api = FakeApi()
    create = api.create

    def create_twice(obj: Object) -> Object:
        create(obj)
        return create(obj) if obj["kind"] == "ConfigMap" else api.get(obj["kind"], obj["metadata"]["name"], "team")

    monkeypatch.setattr(api, "create", create_twice)
    with pytest.raises(KeyboardInterrupt):
        start(api, listener=InterruptedAfter(5))
    assert api.left() == []
    assert start(api).meshes == {"workers": 2}


def test_an_interrupted_first_request_does_not_delete_the_job_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = FakeApi()
    other = start(api)

    def interrupted(obj: Object) -> Object:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "create", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start(api)
    assert lifecycle.refreshed(cast("Api", api), other) == other


def test_the_same_job_is_reused() -> None:
    api = FakeApi()
    first = start(api)
    made = list(api.made)
    assert start(api, listener=InterruptedAfter(1)) == first  # nothing is reported as created
    assert api.made == made


def quota(**hard: str) -> Object:
    spec = {"hard": {name.replace("_", "."): value for name, value in hard.items()}}
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q", "namespace": "team"}, "spec": spec}


def limit_range(of: str, **limits: Object) -> Object:
    spec = {"limits": [{"type": of, **limits}]}
    return {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "l", "namespace": "team"}, "spec": spec}


@pytest.mark.parametrize(
    ("asking", "limited"),
    [
        ([], False),
        ([quota(limits_cpu="8")], True),
        ([quota(requests_cpu="8", limits_memory="8Gi"), limit_range("Container", default={"memory": "1Gi"})], False),
        ([limit_range("Pod", min={"cpu": "1"}, max={"memory": "1Gi"})], False),
        ([limit_range("Container", default={"cpu": "1"})], True),
        ([limit_range("Container", maxLimitRequestRatio={"cpu": "4"})], True),
        ([limit_range("Pod", max={"cpu": "8"})], True),
        ([limit_range("Pod", maxLimitRequestRatio={"cpu": "4"})], True),
    ],
)
def test_cpus_are_a_limit_where_the_namespace_asks_for_one(asking: list[Object], limited: bool) -> None:
    api = FakeApi()
    first = start(api, job(mesh(cpu="2")))
    for each in asking:
        api.create(each)
    (resolved,) = lifecycle.resolve(cast("Api", api), job(mesh(cpu="2"))).meshes
    assert resolved.worker is not None
    assert resolved.worker.cpu_is_limit is limited
    assert start(api, job(mesh(cpu="2"))) == first  # the job that runs is the same, although it has no limit


def test_a_job_without_cpus_does_not_ask_for_quotas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_limits_cpu", lambda *arguments: pytest.fail("asked"))
    start(FakeApi())


def test_a_different_job_of_the_same_name_is_a_conflict() -> None:
    api = FakeApi()
    start(api)
    with pytest.raises(
        Conflict,
        match=r"'trainer' with a different specification is already running .*"
        r"`meshgate kill -n team trainer` ends",
    ):
        start(api, job(mesh(replicas=3)))


def in_thread(function: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []

    def run() -> None:
        try:
            results.append(function())
        except Exception as error:  # noqa: BLE001 - handed to the test
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def test_programs_that_start_the_same_job_concurrently_share_it() -> None:
    api = FakeApi()
    api.pods_come_up = False
    threads = [in_thread(lambda: start(api)) for _ in range(2)]
    api.wait_for_kind("StatefulSet")
    api.bring_up()
    for thread, _ in threads:
        thread.join(DEADLINE)
    (first,), (second,) = (results for _, results in threads)
    assert isinstance(first, RunningJob)
    assert first == second


def test_a_job_deleted_while_it_starts_raises_for_its_waiters() -> None:
    api = FakeApi()
    api.pods_come_up = False
    thread, results = in_thread(lambda: start(api))
    api.wait_for_kind("StatefulSet")
    objects.delete(cast("Api", api), "trainer", "team")
    thread.join(DEADLINE)
    assert isinstance(results[0], NotFound)
    assert "job 'trainer' was deleted while it started" in str(results[0])


def test_the_next_program_completes_the_job_of_a_killed_one() -> None:
    api = FakeApi()
    objects.create_parent(cast("Api", api), job())
    assert start(api).name == "trainer"
    assert api.made[-1] == "StatefulSet"


def test_an_existing_job_that_does_not_become_ready_is_kept() -> None:
    api = FakeApi()
    api.pods_come_up = False
    objects.create_parent(cast("Api", api), job())
    with pytest.raises(
        JobNotReady, match=r"the job existed before and is kept; `meshgate kill -n team trainer` ends it"
    ):
        start(api, timeout=0.2)
    assert ("ConfigMap", "team", "trainer") in api.left()


def test_leftovers_of_an_earlier_job_are_replaced() -> None:
    api = FakeApi()
    first = start(api)
    for kind, namespace, name in api.left():
        if kind != "Secret":
            api.drop_alone(kind, name, namespace)
    second = start(api)
    assert second.token != first.token


class AnotherVersion(FakeApi):
    def _put(self, obj: Object) -> Object:
        if obj["kind"] == "ConfigMap":
            obj = {**obj, "data": {SPEC_KEY: '{"format": 9}'}}
        return super()._put(obj)


def test_a_job_of_another_version_is_listed_and_ended_but_not_used() -> None:
    api = cast("Api", AnotherVersion())
    objects.create_parent(api, job())
    (found,) = lifecycle.list_jobs(api)
    assert (found.name, found.meshes) == ("trainer", None)
    running = RunningJob(name="trainer", namespace="team", uid=found.uid, token="", meshes={})
    assert lifecycle.refreshed(api, running) == running
    with pytest.raises(Rejected, match=r"another version of meshgate: .* `meshgate kill -n team trainer`"):
        lifecycle.find(api, "trainer", "team")
    lifecycle.end(api, found)
    assert lifecycle.refreshed(api, running) is None
    assert lifecycle.list_jobs(api) == []


@pytest.fixture
def cluster() -> FakeApi:
    """A running job."""
    fake = FakeApi()
    api = cast("Api", fake)
    objects.create_owned(api, job(), objects.create_parent(api, job()), IgnoreProgress())
    return fake


def find(cluster: FakeApi) -> GatewayPod:
    found = find_gateway(cast("Api", cluster), "trainer", "team")
    assert found is not None
    return found


def gone_reason(cluster: FakeApi, known: GatewayPod | None) -> str | None:
    return gateway_gone_reason(cast("Api", cluster), "trainer", "team", known)


def copy_of(pod: Object, **metadata: str) -> Object:
    return {**pod, "metadata": {**pod["metadata"], **metadata}}


def test_the_ready_gateway_is_found(cluster: FakeApi) -> None:
    found = find(cluster)
    assert (found.name, found.host, found.port) == (POD, "10.0.0.1", 8650)


def test_the_newest_ready_gateway_is_found(cluster: FakeApi) -> None:
    old = cluster.get("Pod", POD, "team")
    cluster.create(copy_of(old, name="new", uid="new", creationTimestamp="2026-01-02T00:00:00Z"))
    cluster.create(
        copy_of(old, name="newer", uid="newer", creationTimestamp="2026-01-03T00:00:00Z", deletionTimestamp="now")
    )
    assert find(cluster).name == "new"


def test_a_job_without_a_ready_gateway_has_none(cluster: FakeApi) -> None:
    cluster.delete("Pod", POD, "team")
    assert find_gateway(cast("Api", cluster), "trainer", "team") is None


def test_a_gateway_that_forwards_is_found_with_the_pod_of_its_engines() -> None:
    fake = FakeApi()
    api, spec = cast("Api", fake), job(gateway=GatewaySpec(replicas=2))
    objects.create_owned(api, spec, objects.create_parent(api, spec), IgnoreProgress())
    names = {find(fake).name for _ in range(64)}
    assert names == {"trainer-gateway-0", "trainer-gateway-1"}
    fake.request_deletion("Pod", "trainer-gateway-0", "team")
    found, engines = find(fake), find_engines(api, "trainer", "team")
    assert (found.name, found.engines) == ("trainer-gateway-1", engines)
    assert engines is not None
    assert engines.name == "trainer-engines-0"
    fake.delete("Pod", "trainer-engines-0", "team")
    assert find_gateway(api, "trainer", "team") is None
    assert find_engines(api, "trainer", "team") is None
    assert gone_reason(fake, engines) == "its pod trainer-engines-0 was deleted"


def test_a_running_gateway_is_not_gone(cluster: FakeApi) -> None:
    assert gone_reason(cluster, find(cluster)) is None
    assert gone_reason(cluster, None) is None


def test_a_gateway_is_gone_with_its_pod_or_its_job(cluster: FakeApi) -> None:
    known = find(cluster)
    pod = cluster.get("Pod", POD, "team")
    cluster.delete("Pod", POD, "team")
    assert gone_reason(cluster, known) == f"its pod {POD} was deleted"
    cluster.create(copy_of(pod, uid="another"))
    assert gone_reason(cluster, known) == f"its pod {POD} was replaced"
    cluster.delete("ConfigMap", "trainer", "team")
    assert gone_reason(cluster, known) == "the job was deleted"


def test_a_gateway_that_ended_while_its_job_is_being_deleted_is_gone_with_its_job(cluster: FakeApi) -> None:
    """Kubernetes deletes the parent after all else."""
    known = find(cluster)
    cluster.get("ConfigMap", "trainer", "team")["metadata"]["deletionTimestamp"] = "2026-01-02T00:00:00Z"
    assert gone_reason(cluster, known) is None
    cluster.delete("Pod", POD, "team")
    assert gone_reason(cluster, known) == "the job was deleted"


class Server:
    """Lists ``rules``; also grants ``unlisted`` permissions, as a webhook authorizer does."""

    def __init__(self, *rules: Object, unlisted: tuple[tuple[str, str], ...] = ()) -> None:
        self._rules, self._unlisted = list(rules), unlisted
        self.checked: list[Mapping[str, str]] = []

    def list_rules(self, namespace: str) -> list[Object]:
        return self._rules

    def is_allowed(self, attributes: Mapping[str, str]) -> bool:
        self.checked.append(attributes)
        return (attributes["verb"], attributes["resource"]) in self._unlisted

    def denied_user(self, verb: str, kind: str, namespace: str) -> str:
        return "bob"


ALL = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}
CORE = {"verbs": ["create", "get", "list", "watch", "delete"], "apiGroups": [""]}
ALL_OF_CORE = {**CORE, "resources": ["configmaps", "secrets", "services", "serviceaccounts", "pods"]}
APPS = {"verbs": ["*"], "apiGroups": ["apps"], "resources": ["*"]}
RBAC = {"verbs": ["*"], "apiGroups": ["rbac.authorization.k8s.io"], "resources": ["roles", "rolebindings"]}
NETWORK = {"verbs": ["*"], "apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"]}


def missing(server: Server, *, forward: bool = False) -> str:
    with pytest.raises(Forbidden) as caught:
        require_permissions(cast("Api", server), job(), forward=forward)
    return str(caught.value)


def test_a_user_with_all_permissions_needs_no_further_checks() -> None:
    server = Server(ALL)
    require_permissions(cast("Api", server), job(), forward=True)
    assert server.checked == []


def test_all_missing_permissions_are_reported_together() -> None:
    assert missing(Server(ALL_OF_CORE, APPS)) == (
        "bob may not create roles.rbac.authorization.k8s.io in namespace 'team': "
        "nor create rolebindings.rbac.authorization.k8s.io, networkpolicies.networking.k8s.io; "
        "docs/kubernetes.md has a Role with the required permissions; without permissions for roles, name an existing "
        "account: gateway=Compute(service_account_name=…)"
    )


def test_a_single_missing_verb_is_reported() -> None:
    without_delete = {**ALL_OF_CORE, "verbs": ["create", "get", "list", "watch"]}
    assert "bob may not delete configmaps in namespace 'team'" in missing(Server(without_delete, APPS, RBAC, NETWORK))


def test_a_port_forward_needs_its_own_permission() -> None:
    server = Server(ALL_OF_CORE, APPS, RBAC, NETWORK)
    require_permissions(cast("Api", server), job(), forward=False)
    assert "may not get pods/portforward in namespace 'team'" in missing(server, forward=True)


def test_a_permission_for_named_objects_does_not_cover_all() -> None:
    by_name = {**ALL_OF_CORE, "resourceNames": ["one"]}
    assert not Permission("create", "Secret").granted_by([by_name])


def test_permissions_that_the_server_does_not_list_are_checked_one_by_one() -> None:
    every = tuple(
        (each.verb, each.resource_attributes("team")["resource"]) for each in required_permissions(job(), forward=True)
    )
    server = Server(unlisted=every)
    require_permissions(cast("Api", server), job(), forward=True)
    assert {"namespace": "team", "verb": "create", "group": "apps", "resource": "statefulsets"} in server.checked
    assert server.checked[-1]["subresource"] == "portforward"


def test_only_the_kinds_that_the_job_creates_are_required() -> None:
    def kinds(*meshes: object) -> set[str]:
        return {each.kind for each in required_permissions(job(*meshes), forward=False) if each.verb == "create"}  # type: ignore[arg-type]

    assert "StatefulSet" in kinds(mesh())
    assert "StatefulSet" not in kinds(found_mesh())
    assert "MonarchMesh" in kinds(mesh().model_copy(update={"way": "monarchmesh"}))
