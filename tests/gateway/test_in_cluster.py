"""A gateway and the Kubernetes job that it belongs to."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import cast

import pytest
from pydantic import SecretStr

from meshgate_gateway import in_cluster
from meshgate_gateway.hosts.provider import HostsUnavailable
from meshgate_gateway.http.auth import Identity, TokenAuthenticator
from meshgate_gateway.http.forwarding import EnginesUnavailable
from meshgate_gateway.http.messages import HeadParser, Request
from meshgate_gateway.in_cluster import ClusterJob, EnginesOfJob, create_provisioner
from meshgate_gateway.supervisor.link import SupervisorLink
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import NoCluster, NotFound, Unreachable
from meshgate_kubernetes.jobs import objects
from meshgate_kubernetes.manifests.job_objects import sizes_data
from meshgate_kubernetes.manifests.spec import GatewaySpec
from tests.clusters.kubernetes.fake_api import FakeApi, IgnoreProgress
from tests.clusters.kubernetes.objects import job
from tests.gateway.unsupervised import Unsupervised

TOKEN = "correct-horse-battery-staple"


@pytest.fixture
def cluster() -> FakeApi:
    """A running job."""
    fake = FakeApi()
    api = cast("Api", fake)
    objects.create_owned(api, job(), objects.create_parent(api, job()), IgnoreProgress())
    return fake


def cluster_job(api: FakeApi, supervisor: Unsupervised | None = None) -> ClusterJob:
    link = cast("SupervisorLink", supervisor or Unsupervised())
    return ClusterJob(cast("Api", api), "trainer", "team", link)


def request(token: str) -> Request:
    parsed = HeadParser().feed(f"GET / HTTP/1.1\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
    assert parsed is not None
    return parsed


def test_the_hosts_are_the_worker_pods_of_the_job(cluster: FakeApi) -> None:
    async def run() -> list[str]:
        hosts = cluster_job(cluster).hosts()
        try:
            return [host.name for host in await hosts.hosts("workers")]
        finally:
            await hosts.close()

    assert asyncio.run(run()) == ["trainer-workers-0", "trainer-workers-1"]


def test_the_authenticator_accepts_identities_of_the_jobs_namespace(cluster: FakeApi) -> None:
    cluster.users = {"alices": {"username": "alice"}}
    cluster.permissions = {("alice", "create", "pods/exec")}
    authenticator = cluster_job(cluster).authenticator(TokenAuthenticator(SecretStr(TOKEN)))
    assert asyncio.run(authenticator.authenticate(request(TOKEN))) == Identity("job")
    assert asyncio.run(authenticator.authenticate(request("alices"))) == Identity("kubernetes:alice")


def test_delete_removes_the_whole_job_and_is_idempotent(cluster: FakeApi) -> None:
    running = cluster_job(cluster)
    cluster.impatient = []
    asyncio.run(running.delete())
    assert cluster.left() == []
    assert cluster.impatient == []
    asyncio.run(running.delete())


def test_a_gateway_says_why_it_follows_another(cluster: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sessions of the earlier one are gone, and attaching to one of them fails with this reason."""
    running = cluster_job(cluster)
    assert asyncio.run(running.restart_reason()) == ""  # this host is no pod
    name = next(made["metadata"]["name"] for made in cluster.list_objects("Pod", "team", "")[0])
    monkeypatch.setattr("socket.gethostname", lambda: name)
    assert asyncio.run(running.restart_reason()) == ""
    young = cluster.get("Pod", name, "team")
    young["metadata"]["creationTimestamp"] = "2026-01-01T02:00:00Z"
    monkeypatch.setattr(cluster, "get", lambda kind, *key: young if kind == "Pod" else FakeApi.get(cluster, kind, *key))
    assert "created at 2026-01-01T02:00:00Z, long after the job" in asyncio.run(running.restart_reason())


def test_a_missing_job_raises() -> None:
    with pytest.raises(NotFound, match="'trainer'"):
        cluster_job(FakeApi())


def test_a_further_server_needs_no_api_server_to_know_its_job(cluster: FakeApi) -> None:
    supervisor = Unsupervised()
    first = cluster_job(cluster, supervisor)
    further = cluster_job(FakeApi(), supervisor)
    assert (further._spec, further._uid) == (first._spec, first._uid)


def test_provisioning_needs_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(NoCluster, match="cannot use the pod's service account"):
        asyncio.run(create_provisioner(tmp_path / "policy.json", TokenAuthenticator(SecretStr(TOKEN))))


def test_a_silent_api_server_delays_a_list_of_sessions_little(
    cluster: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    running = cluster_job(cluster)
    monkeypatch.setattr(in_cluster, "RESTART_REASON_TIMEOUT", 0.01)
    monkeypatch.setattr(cluster, "get", lambda *key: released.wait())

    async def reason() -> str:
        found = await running.restart_reason()
        released.set()
        return found

    assert asyncio.run(reason()) == ""


def test_the_numbers_of_hosts_of_a_scaled_job_are_read_and_kept_for_a_further_server(cluster: FakeApi) -> None:
    supervisor = Unsupervised()

    async def run() -> None:
        running = cluster_job(cluster, supervisor)
        hosts = running.hosts()
        try:
            cluster.merge_patch("ConfigMap", "trainer", "team", {"data": sizes_data({"workers": 1})})
            assert hosts.meshes() == {"workers": 2}
            await running.read_sizes(hosts)
            assert hosts.meshes() == {"workers": 1}
            await running.delete()
            with pytest.raises(HostsUnavailable, match=r"cannot read the specification of its job: .*'trainer'"):
                await running.read_sizes(hosts)
        finally:
            await hosts.close()

    asyncio.run(run())
    further = cluster_job(FakeApi(), supervisor)
    assert further._spec.meshes[0].replicas == 1
    assert further.facts() == {"created_with": {"workers": 2}}


def test_engines_are_found_by_their_pod_and_where_they_were_while_the_api_server_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeApi()
    api, spec = cast("Api", fake), job(gateway=GatewaySpec(replicas=2))
    engines = EnginesOfJob(api, "trainer", "team")
    with pytest.raises(EnginesUnavailable, match="the pod with the engines of job 'trainer' is not ready"):
        asyncio.run(engines.find())
    objects.create_owned(api, spec, objects.create_parent(api, spec), IgnoreProgress())

    def away(*_: object) -> None:
        raise Unreachable("the API server does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(fake, "list_objects", away)
        with pytest.raises(EnginesUnavailable, match="cannot look for the engines of its job: the API server does not"):
            asyncio.run(engines.find())
    assert asyncio.run(engines.find()) == ("10.0.0.1", 8650)
    monkeypatch.setattr(fake, "list_objects", away)
    assert asyncio.run(engines.find()) == ("10.0.0.1", 8650)


def test_a_gateway_in_front_of_the_engines_accepts_the_identities_that_others_do(
    cluster: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.users = {"alices": {"username": "alice"}}
    cluster.permissions = {("alice", "create", "pods/exec")}
    monkeypatch.setattr(Api, "in_cluster", lambda: cluster)
    engines = EnginesOfJob.of_this_namespace("trainer")
    assert engines.name == {"job": "trainer", "namespace": "gateways"}
    authenticator = engines.authenticator(TokenAuthenticator(SecretStr(TOKEN)))
    assert asyncio.run(authenticator.authenticate(request("alices"))) == Identity("kubernetes:alice")
