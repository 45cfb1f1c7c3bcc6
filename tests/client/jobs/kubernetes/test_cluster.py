"""Errors of the Kubernetes layer, as a driver sees them, and their advice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest

from meshgate.errors import JobError, JobNotRunning, JobStartFailed
from meshgate.jobs.kubernetes import cluster
from meshgate.jobs.kubernetes.cluster import Cluster, PodDialer, WatchedUrlDialer
from meshgate.jobs.kubernetes.compute import Compute
from meshgate.jobs.kubernetes.port_forward import ForwardFailed
from meshgate.jobs.kubernetes.requests import JobRequest, mesh_from_compute
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import KubernetesError, Unauthenticated, Unreachable
from meshgate_kubernetes.jobs.lifecycle import GatewayPod, RunningJob
from tests.clusters.kubernetes.fake_api import FakeApi

REQUEST = JobRequest(name="trainer", namespace="team", meshes=(mesh_from_compute("workers", Compute()),))
Replies = Callable[..., None]


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


def cluster_of(api: FakeApi, *, inside: bool = False, url: str | None = None) -> Cluster:
    return Cluster(cast("Api", api), inside=inside, url=url)


@pytest.fixture
def _silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHGATE_PROGRESS", "off")


@pytest.mark.usefixtures("_silent")
def test_a_pod_without_rights_is_advised_to_use_a_provisioning_gateway() -> None:
    with pytest.raises(JobStartFailed, match=r"bob may not create configmaps in namespace 'team'.* set MESHGATE_URL"):
        cluster_of(WithoutRights(), inside=True).start(REQUEST)


@pytest.mark.usefixtures("_silent")
def test_a_laptop_without_rights_is_advised_to_add_a_role() -> None:
    with pytest.raises(JobStartFailed) as caught:
        cluster_of(WithoutRights()).start(REQUEST)
    assert "docs/kubernetes.md has a Role with the required permissions" in str(caught.value)
    assert "MESHGATE_URL" not in str(caught.value)
    assert caught.value.__cause__ is None  # the cause has the same text


@pytest.mark.usefixtures("_silent")
def test_an_error_of_the_cluster_is_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise Unreachable("no response")

    monkeypatch.setattr(cluster.lifecycle, "start", fail)
    with pytest.raises(JobStartFailed, match="no response") as caught:
        cluster_of(FakeApi()).start(REQUEST)
    assert caught.value.__cause__ is None  # the cause has the same text


@pytest.mark.usefixtures("_silent")
def test_the_right_to_port_forward_is_checked_only_if_it_is_needed() -> None:
    with pytest.raises(JobStartFailed, match="may not get pods/portforward"):
        cluster_of(WithoutPortForward()).start(REQUEST)
    for other in (
        cluster_of(WithoutPortForward(), inside=True),
        cluster_of(WithoutPortForward(), url="wss://gateway.example"),
    ):
        other.end(other.start(REQUEST))


@pytest.mark.usefixtures("_silent")
def test_what_a_session_needs_is_imported_while_pods_start(monkeypatch: pytest.MonkeyPatch) -> None:
    api, imported = FakeApi(), []
    api.pods_come_up = False

    def record() -> None:
        imported.append(api.made[-1])
        api.bring_up()

    monkeypatch.setattr(cluster, "_import_proxies", record)
    cluster_of(api).start(REQUEST)
    assert imported == api.made[-1:]


@pytest.mark.usefixtures("_silent")
def test_a_missing_job_is_named_with_its_namespace() -> None:
    with pytest.raises(JobNotRunning, match="there is no job 'trainer' in namespace 'team'"):
        cluster_of(FakeApi()).find_job("trainer", "team")


class Expired(FakeApi):
    def delete(self, *what: Any, **how: Any) -> None:
        raise Unauthenticated("the API server does not accept the credentials")


@pytest.mark.usefixtures("_silent")
def test_a_job_that_cannot_be_ended_is_named_with_the_command_to_end_it() -> None:
    job = RunningJob(name="trainer", namespace="team", uid="1", token="", meshes={"workers": 1})
    with pytest.raises(
        JobError, match=r"credentials\n.*may still be running; to end it, run `meshgate kill -n team trainer`"
    ):
        cluster_of(Expired()).end(job)


@pytest.fixture
def replies(monkeypatch: pytest.MonkeyPatch) -> Replies:
    """Sets what the API server reports of the gateway pod, in order."""

    def set_replies(*pods: GatewayPod | KubernetesError | None) -> None:
        remaining = iter(pods)

        def find_gateway(*_: Any) -> GatewayPod | None:
            pod = next(remaining)
            if isinstance(pod, KubernetesError):
                raise pod
            return pod

        monkeypatch.setattr(cluster, "find_gateway", find_gateway)

    return set_replies


def pod(name: str, host: str = "10.0.0.1", engines: GatewayPod | None = None) -> GatewayPod:
    return GatewayPod(name=name, host=host, uid=name, container="c", port=8600, engines=engines)


API: Any = None


@pytest.mark.parametrize(("host", "url"), [("10.0.0.1", "ws://10.0.0.1:8600"), ("fd00::1", "ws://[fd00::1]:8600")])
def test_a_pod_is_dialed_at_its_address_with_the_token(replies: Replies, host: str, url: str) -> None:
    replies(pod("a", host))
    route = asyncio.run(PodDialer(API, "job", "team", "secret").dial())
    assert (route.url, route.headers, route.through_proxy) == (url, {"Authorization": "Bearer secret"}, False)


def test_a_gateway_without_a_ready_pod_cannot_be_dialed_now(replies: Replies) -> None:
    replies(None, Unreachable("the API server does not answer"))
    gateway = PodDialer(API, "job", "team", "secret")
    with pytest.raises(ForwardFailed, match="the gateway has no ready pod"):
        asyncio.run(gateway.dial())
    with pytest.raises(ForwardFailed, match="the API server does not answer"):
        asyncio.run(gateway.dial())


def test_a_replacement_pod_is_not_dialed_because_it_does_not_hold_the_session(replies: Replies) -> None:
    replies(pod("a"), pod("a"), pod("b"))
    gateway = WatchedUrlDialer(API, "job", "team", "secret", "wss://gateway.example:80")
    for _ in range(2):
        assert asyncio.run(gateway.dial()).url == "wss://gateway.example:80"
    with pytest.raises(ForwardFailed, match="another gateway pod has replaced"):
        asyncio.run(gateway.dial())


def test_a_gateway_in_front_of_the_same_engines_is_dialed(replies: Replies, monkeypatch: pytest.MonkeyPatch) -> None:
    replies(
        *(
            pod(name, f"10.0.0.{number}", pod(of))
            for number, (name, of) in enumerate([("a", "e"), ("b", "e"), ("a", "f")])
        )
    )
    gateway = PodDialer(API, "job", "team", "secret")
    assert [asyncio.run(gateway.dial()).url for _ in range(2)] == ["ws://10.0.0.0:8600", "ws://10.0.0.1:8600"]
    monkeypatch.setattr(cluster, "gateway_gone_reason", lambda api, job, namespace, known: known.name)
    assert asyncio.run(gateway.gone()) == "e"
    with pytest.raises(ForwardFailed, match="another gateway pod has replaced"):
        asyncio.run(gateway.dial())


def test_an_unreachable_api_server_does_not_declare_a_gateway_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone_reason(*_: Any) -> str:
        raise Unreachable("the API server does not answer")

    gateway = PodDialer(API, "job", "team", "secret")
    monkeypatch.setattr(cluster, "gateway_gone_reason", gone_reason)
    assert asyncio.run(gateway.gone()) is None
    monkeypatch.setattr(cluster, "gateway_gone_reason", lambda *_: "the job was deleted")
    assert asyncio.run(gateway.gone()) == "the job was deleted"
    assert str(gateway) == "the gateway of job 'job' (namespace team)"


# --- the number of hosts of a mesh


def procs(name: str, *hosts: str, **facts: Any) -> dict[str, Any]:
    return {"kind": "procs", "name": name, "sizes": {"hosts": len(hosts)}, "hosts": hosts, "ended": [], **facts}


def session(*meshes: dict[str, Any], **facts: Any) -> dict[str, Any]:
    return {"session": "ab" * 16, "owner": "job", "connected": True, "pid": 1, "meshes": meshes, **facts}


@pytest.fixture
def scalable(monkeypatch: pytest.MonkeyPatch, _silent: None) -> tuple[Cluster, list[Any], list[str]]:
    """The cluster of a job, the sessions that its gateway knows, and what that is asked."""
    sessions: list[Any] = []
    asked: list[str] = []

    def request_json(dialer: object, path: str, body: bytes | None = None) -> dict[str, Any]:
        asked.append(f"{'GET' if body is None else 'POST'} {path}")
        return {"gateway_version": "0.1.0", "python": "3.11", "meshes": {}, "sessions": sessions}

    monkeypatch.setattr(cluster, "request_json", request_json)
    return cluster_of(FakeApi()), sessions, asked


WIDE = REQUEST.with_mesh(mesh_from_compute("workers", Compute(replicas=2)))


def test_a_mesh_grows_and_shrinks_and_its_gateway_reads_that(scalable: tuple[Cluster, list[Any], list[str]]) -> None:
    provider, sessions, asked = scalable
    sessions.append(session(procs("left", "trainer-workers-0"), procs("loose"), name="night"))
    job = provider.start(WIDE)
    grown = provider.scale(job, "workers", 3, 10)
    assert (grown.meshes, asked) == ({"workers": 3}, ["POST /v1/job", "POST /v1/job"])
    assert provider.refreshed(job) == grown
    assert provider.scale(grown, "workers", 1, 10).meshes == {"workers": 1}
    assert asked[2:] == ["POST /v1/job", "GET /v1/status", "POST /v1/job"]


def test_hosts_on_which_processes_run_are_not_removed(scalable: tuple[Cluster, list[Any], list[str]]) -> None:
    provider, sessions, _ = scalable
    stopped = {"ranks": [[0, 0]], "reason": "stopped by the program", "stopped": True}
    both = procs("both", "trainer-workers-0", "trainer-workers-1")
    sessions.append(session(both, procs("over", "trainer-workers-1", ended=[stopped])))
    sessions.append(session(procs("named", "trainer-workers-1"), name="night"))
    job = provider.start(WIDE)
    message = (
        r"cannot scale mesh 'workers' of job 'trainer' from 2 to 1 hosts: processes run on hosts that would be removed"
        r": 'both' of session abababab \(trainer-workers-1\); 'named' of session night \(trainer-workers-1\)\. Nothing "
        r"was changed\. Stop them first \(procs\.stop\(\)\)"
    )
    with pytest.raises(JobError, match=message):
        provider.scale(job, "workers", 1, 10)
    sessions[:] = [session(problem="its engine did not answer within 3 s")]
    with pytest.raises(
        JobError, match="not known what runs on trainer-workers-1: session abababab: its engine did not"
    ):
        provider.scale(job, "workers", 1, 10)
    assert provider.refreshed(job) == job
