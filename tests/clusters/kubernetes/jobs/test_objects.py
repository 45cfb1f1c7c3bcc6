"""The objects of a job are created once, replaced if stale, and deleted completely."""

from __future__ import annotations

import base64
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typing_extensions import Self

from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import Conflict, Forbidden, KubernetesError, NotFound, Rejected
from meshgate_kubernetes.jobs import objects
from meshgate_kubernetes.manifests.job_objects import EVENTS_RULE, SPEC_KEY
from meshgate_kubernetes.manifests.pods import PACKED_WHEEL
from meshgate_kubernetes.manifests.spec import GatewaySpec
from meshgate_kubernetes.status.observer import Observer
from tests.clusters.kubernetes.fake_api import FakeApi
from tests.clusters.kubernetes.objects import Object, job, pod


class Created:
    """Records the created objects."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def created(self, obj: Object) -> None:
        self.kinds.append(obj["kind"])

    def progress(self, progress: object) -> None: ...


def create(cluster: FakeApi, **fields: Any) -> Object:
    """Creates all objects of a job; returns its parent."""
    api, spec = cast("Api", cluster), job(**fields)
    parent = objects.create_parent(api, spec)
    objects.create_owned(api, spec, parent, Created())
    return parent


def test_the_specification_is_read_from_the_parent() -> None:
    cluster = FakeApi()
    parent = create(cluster, idle_timeout=60)
    assert objects.read_spec(cast("Api", cluster), "trainer", "team") == (
        job(idle_timeout=60),
        parent["metadata"]["uid"],
    )


def test_a_missing_terminating_or_foreign_parent_is_not_a_job() -> None:
    cluster = FakeApi()
    api = cast("Api", cluster)
    head = {"kind": "ConfigMap", "metadata": {"namespace": "team"}}
    cluster.create({**head, "metadata": {**head["metadata"], "name": "foreign"}})
    terminating = {"namespace": "team", "name": "terminating", "deletionTimestamp": "now"}
    cluster.create({**head, "metadata": terminating, "data": {SPEC_KEY: job().model_dump_json()}})
    for name in ("missing", "foreign", "terminating"):
        with pytest.raises(NotFound):
            objects.read_parent(api, name, "team")


def test_creating_the_objects_again_keeps_those_that_exist() -> None:
    cluster = FakeApi()
    parent = create(cluster)
    before, again = list(cluster.made), Created()
    objects.create_owned(cast("Api", cluster), job(), parent, again)
    assert cluster.made == before
    assert not again.kinds


def test_the_wheel_is_sent_only_to_a_gateway_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "packed_wheel", lambda: b"packed")
    cluster = FakeApi()
    create(cluster)
    assert ("Secret", "team", "trainer-wheel") not in cluster.left()
    cluster = FakeApi()
    create(cluster, gateway=GatewaySpec(install_monarch=True))
    assert base64.b64decode(cluster.get("Secret", "trainer-wheel", "team")["data"][PACKED_WHEEL]) == b"packed"
    assert cluster.made.index("Secret") < cluster.made.index("Deployment")


@pytest.mark.parametrize(
    "error",
    [
        Forbidden("create", "poddisruptionbudgets.policy", "team", user="alice"),
        NotFound("the server could not find the requested resource"),
    ],
)
def test_a_job_without_a_disruption_budget_runs_with_a_warning(
    error: KubernetesError,
) -> None:
    class Restricted(FakeApi):
        def create(self, obj: Object) -> Object:
            if obj["kind"] == "PodDisruptionBudget":
                raise error
            return super().create(obj)

    cluster = Restricted()
    with pytest.warns(UserWarning, match="job 'trainer' has no PodDisruptionBudget, so draining a node may evict"):
        create(cluster)
    assert "StatefulSet" in cluster.made


def test_an_older_cluster_gets_the_version_that_it_serves(recwarn: pytest.WarningsRecorder) -> None:
    class Older(FakeApi):
        def create(self, obj: Object) -> Object:
            if obj.get("apiVersion") == "policy/v1":
                raise NotFound("the server could not find the requested resource")
            return super().create(obj)

    cluster = Older()
    create(cluster)
    assert cluster.made.count("PodDisruptionBudget") == 1
    assert not recwarn.list


def test_a_user_who_may_not_grant_the_permission_for_events_creates_the_role_without_it() -> None:
    class Restricted(FakeApi):
        def create(self, obj: Object) -> Object:
            if EVENTS_RULE in obj.get("rules", ()):
                raise Forbidden("create", "roles.rbac.authorization.k8s.io", "team", user="alice")
            return super().create(obj)

    cluster = Restricted()
    create(cluster)
    rules = cluster.get("Role", "trainer-gateway", "team")["rules"]
    assert [rule["resources"] for rule in rules] == [["pods"], ["configmaps"]]


def test_every_other_object_is_required() -> None:
    class Restricted(FakeApi):
        def create(self, obj: Object) -> Object:
            if obj["kind"] == "NetworkPolicy":
                raise Forbidden("create", "networkpolicies.networking.k8s.io", "team", user="alice")
            return super().create(obj)

    with pytest.raises(Forbidden, match="networkpolicies"):
        create(Restricted())


def test_an_object_of_another_owner_is_a_conflict() -> None:
    cluster = FakeApi()
    cluster.create({"kind": "Service", "metadata": {"namespace": "team", "name": "trainer-gateway"}})
    with pytest.raises(Conflict, match=r"Service 'trainer-gateway' .* does not belong to job 'trainer'"):
        create(cluster)


class LosingAnswers(FakeApi):
    """Loses the answer to each creation, and then refuses the repeated request."""

    def __init__(self, refusal: type[KubernetesError]) -> None:
        super().__init__()
        self._refusal = refusal

    def create(self, obj: Object) -> Object:
        super().create(obj)
        raise self._refusal(f"{obj['kind']} cannot be created twice")


@pytest.mark.parametrize("refusal", [Conflict, Rejected])  # Rejected: the first request has used up the quota
def test_a_parent_whose_answer_was_lost_is_kept(refusal: type[KubernetesError]) -> None:
    cluster = LosingAnswers(refusal)
    parent = objects.create_parent(cast("Api", cluster), job())
    assert parent == cluster.get("ConfigMap", "trainer", "team")


def test_a_parent_that_may_not_be_created_is_not_taken_from_another_program() -> None:
    class Refusing(FakeApi):
        def create(self, obj: Object) -> Object:
            raise Rejected("exceeded quota")

    cluster = Refusing()
    FakeApi.create(cluster, {"kind": "ConfigMap", "metadata": {"namespace": "team", "name": "trainer"}})
    with pytest.raises(Rejected, match="quota"):
        objects.create_parent(cast("Api", cluster), job())
    assert cluster.left() == [("ConfigMap", "team", "trainer")]


def test_objects_of_an_earlier_job_are_replaced_although_answers_are_lost() -> None:
    cluster = LosingAnswers(Conflict)
    parent = create(cluster)
    cluster.drop_alone("ConfigMap", "trainer", "team")
    stale = cluster.get("Service", "trainer-gateway", "team")["metadata"]["uid"]
    again = create(cluster)
    assert again["metadata"]["uid"] != parent["metadata"]["uid"]
    service = cluster.get("Service", "trainer-gateway", "team")["metadata"]
    assert service["uid"] != stale
    assert [each["uid"] for each in service["ownerReferences"]] == [again["metadata"]["uid"]]


def test_deleting_a_job_leaves_no_object_and_deleting_it_again_does_nothing() -> None:
    cluster = FakeApi()
    parent = create(cluster)
    api = cast("Api", cluster)
    objects.delete(api, "trainer", "team", uid="another")
    assert ("ConfigMap", "team", "trainer") in cluster.left()
    objects.delete(api, "trainer", "team", uid=parent["metadata"]["uid"])
    assert cluster.left() == []
    objects.delete(api, "trainer", "team")


def test_objects_whose_parent_was_orphaned_are_deleted() -> None:
    cluster = FakeApi()
    create(cluster)
    cluster.drop_alone("ConfigMap", "trainer", "team")
    objects.delete(cast("Api", cluster), "trainer", "team")
    assert cluster.left() == []


class Undeletable(FakeApi):
    """Keeps Services, as a finalizer does."""

    def _drop(self, obj: Object) -> None:
        if obj["kind"] != "Service":
            super()._drop(obj)


def test_objects_that_remain_are_listed() -> None:
    cluster = Undeletable()
    create(cluster)
    with pytest.raises(Rejected, match=r"still exist, .* for 0\.1 s: Service trainer-gateway, Service trainer-w"):
        objects.delete(cast("Api", cluster), "trainer", "team", timeout=0.1)


class OnePodAWait(Observer):
    """Sees one pod go in each wait, all but one second before its timeout."""

    def __init__(self, pods: int, stays: int) -> None:
        self.now = 0.0
        self._pods, self._stays = [pod(f"pod-{number}") for number in range(pods)], stays

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def objects(self, kind: str, selector: str | None = None) -> list[Object]:
        return self._pods if kind == "Pod" else []

    def wait_for(self, done: Callable[[], bool], timeout: float | None) -> bool:
        assert timeout is not None
        if len(self._pods) == self._stays:
            self.now += timeout
        else:
            self.now += timeout - 1
            self._pods.pop()
        return done()


@pytest.mark.parametrize(("stays", "waited"), [(0, 8 * 59), (2, 6 * 59 + 60)])
def test_pods_that_go_one_by_one_are_waited_for_as_long_as_they_go(
    stays: int, waited: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Controllers whose requests are limited delete a pod at a time."""
    observer = OnePodAWait(8, stays)
    monkeypatch.setattr(objects, "Observer", lambda *_: observer)
    monkeypatch.setattr(objects, "time", SimpleNamespace(monotonic=lambda: observer.now))
    assert objects.wait_gone(cast("Api", FakeApi()), "trainer", "team", timeout=60) == (stays == 0)
    assert observer.now == waited


class Slow(FakeApi):
    """Deletes Services a moment after their parent, as a slow garbage collector does."""

    lists = 0

    def list_objects(self, kind: str, *arguments: Any) -> tuple[list[Object], str]:
        if kind == "Service" and not any(left[0] == "ConfigMap" for left in self.left()):
            self.lists += 1
            if self.lists == 2:
                self.drop_alone("Service", "trainer-gateway", "team")
                self.drop_alone("Service", "trainer-workers", "team")
        return super().list_objects(kind, *arguments)

    def _drop(self, obj: Object) -> None:
        if obj["kind"] != "Service":
            super()._drop(obj)


def test_objects_that_are_deleted_after_their_parent_are_waited_for() -> None:
    cluster = Slow()
    create(cluster)
    objects.delete(cast("Api", cluster), "trainer", "team")
    assert cluster.left() == []
    assert cluster.lists == 2


class Operated(FakeApi):
    """A cluster with the Monarch operator, whose garbage collector does not know MonarchMesh yet."""

    def __init__(self) -> None:
        super().__init__()
        self._directly = ""
        self.parent = create(self)
        self.operate("mesh", str(self.parent["metadata"]["uid"]))

    def operate(self, name: str, owner: str) -> None:
        """Makes a mesh, and what the operator makes of it."""
        template = {"metadata": {"labels": self.parent["metadata"]["labels"]}}
        for kind in ("MonarchMesh", "StatefulSet"):
            head = {"namespace": "team", "name": name, **template["metadata"], "ownerReferences": [{"uid": owner}]}
            made = self.create({"kind": kind, "metadata": head, "spec": {"replicas": 2, "template": template}})
            owner = made["metadata"]["uid"]

    def serves(self, kind: str) -> bool:
        return True

    def delete(self, kind: str, *what: Any, **how: Any) -> None:
        self._directly = kind
        super().delete(kind, *what, **how)

    def _drop(self, obj: Object) -> None:
        late = obj["kind"] in ("MonarchMesh", "StatefulSet") and not obj["metadata"]["name"].startswith("trainer")
        if not late or obj["kind"] == self._directly:
            super()._drop(obj)

    def end(self, uid: str | None = None) -> None:
        objects.delete(cast("Api", self), "trainer", "team", uid=uid, timeout=0.1)


@pytest.mark.parametrize("named", [True, False])
def test_meshes_of_the_operator_are_deleted_without_the_garbage_collector(named: bool) -> None:
    cluster = Operated()
    cluster.end(cluster.parent["metadata"]["uid"] if named else None)
    assert cluster.left() == []


def test_meshes_of_the_operator_that_another_job_owns_stay() -> None:
    cluster = Operated()
    cluster.operate("other", "another job")
    with pytest.raises(
        Rejected, match=r"still exist, .*: StatefulSet other, Pod other-0, Pod other-1, MonarchMesh other"
    ):
        cluster.end(cluster.parent["metadata"]["uid"])


def test_a_user_who_may_not_delete_meshes_of_the_operator_waits_for_the_garbage_collector() -> None:
    class Restricted(Operated):
        def delete(self, kind: str, *what: Any, **how: Any) -> None:
            if kind == "MonarchMesh":
                for late in ("MonarchMesh", "StatefulSet"):
                    super().delete(late, "mesh", "team")
                raise Forbidden("delete", "monarchmeshes.monarch.pytorch.org", "team", user="alice")
            super().delete(kind, *what, **how)

    cluster = Restricted()
    cluster.end()
    assert cluster.left() == []


class InterruptedDeletion(FakeApi):
    """Raises KeyboardInterrupt after the first deletion."""

    def delete(self, *what: Any, **how: Any) -> None:
        super().delete(*what, **how)
        raise KeyboardInterrupt

    def serves(self, kind: str) -> bool:
        raise AssertionError("the deletion must come first")


def test_the_deletion_is_the_first_request() -> None:
    interrupted = InterruptedDeletion()
    create(interrupted)
    with pytest.raises(KeyboardInterrupt):
        objects.delete(cast("Api", interrupted), "trainer", "team")
    assert interrupted.left() == []


class ThreeLooks(Observer):
    """Sees ``pods`` twice, then none. ``looking``: it evaluates a condition, whose CPU time delays the next one."""

    def __init__(self, pods: list[Object]) -> None:
        self._looks = [pods, pods, []]
        self._seen: list[Object] = []
        self.looking = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def objects(self, kind: str, selector: str | None = None) -> list[Object]:
        return self._seen if kind == "Pod" else []

    def wait_for(self, done: Callable[[], bool], timeout: float | None) -> bool:
        self.looking = True
        while True:
            self._seen = self._looks.pop(0)
            if done():
                self.looking = False
                return True


def test_a_terminating_pod_with_a_node_is_force_deleted_once_and_between_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    deleted: list[str] = []

    class Deletes:
        def delete(self, kind: str, name: str, namespace: str, **options: object) -> None:
            assert not observer.looking
            deleted.append(name)

    ending, unscheduled = pod("ending", containerStatuses=[]), pod("unscheduled", containerStatuses=[])
    running = pod("running")
    for each in (ending, running):
        each["spec"]["nodeName"] = "node0"
    for each in (ending, unscheduled, running):
        each["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    observer = ThreeLooks([ending, unscheduled, running, pod("alive", containerStatuses=[])])
    monkeypatch.setattr(objects, "Observer", lambda *_: observer)
    assert objects.wait_gone(cast("Api", Deletes()), "trainer", "team")
    assert deleted == ["ending"]
