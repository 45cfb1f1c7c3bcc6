"""Worker pods as hosts: when they are ready, and when they are lost and replaced."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import cast
from urllib.parse import urlsplit

import pytest

from meshgate_gateway.hosts import kubernetes
from meshgate_gateway.hosts.kubernetes import KubernetesHosts, with_versions
from meshgate_gateway.hosts.provider import Host, HostsUnavailable
from meshgate_gateway.supervisor.link import SupervisorLink
from meshgate_kubernetes.api.client import Api
from meshgate_kubernetes.errors import Forbidden, KubernetesError, Unauthenticated
from meshgate_kubernetes.jobs import objects
from meshgate_kubernetes.manifests.job_objects import with_sizes
from meshgate_kubernetes.manifests.names import Names
from meshgate_kubernetes.manifests.pods import VERSIONS_PORT_OFFSET, WORKER_BOOTSTRAP
from meshgate_kubernetes.manifests.spec import JobSpec
from meshgate_wire.handshake import monarch_version
from tests.clusters.kubernetes.fake_api import FakeApi, IgnoreProgress
from tests.clusters.kubernetes.objects import Object, event, found_mesh, job
from tests.clusters.kubernetes.objects import pod as pod_object
from tests.gateway.unsupervised import Unsupervised
from tests.ports import free_port, has_ipv6
from tests.waiting import wait_for


@asynccontextmanager
async def with_hosts(
    api: FakeApi, supervisor: Unsupervised | None = None, on_event: Callable[..., None] = lambda *args: None
) -> AsyncIterator[KubernetesHosts]:
    client, spec = cast("Api", api), job()
    if not api.left():
        _create(client, spec)
    hosts = KubernetesHosts(client, spec, cast("SupervisorLink", supervisor or Unsupervised()))
    hosts.watch(on_event, on_event)
    try:
        yield hosts
    finally:
        await hosts.close()


def _create(api: Api, spec: JobSpec) -> None:
    objects.create_owned(api, spec, objects.create_parent(api, spec), IgnoreProgress())


async def test_hosts_are_returned_in_rank_order_once_all_are_ready() -> None:
    api = FakeApi()
    api.pods_come_up = False
    async with with_hosts(api) as hosts:
        found = asyncio.create_task(hosts.hosts("workers"))
        ready = asyncio.create_task(hosts.wait_ready())
        done, _ = await asyncio.wait([found, ready], timeout=0)
        assert not done
        api.bring_up()
        assert [host.name for host in await found] == ["trainer-workers-0", "trainer-workers-1"]
        await ready
        assert hosts.meshes() == {"workers": 2}
        assert hosts.present("workers") == dict(enumerate(found.result()))


async def test_the_first_host_has_the_versions_that_it_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    async def report(host: Host) -> Host:
        return host.model_copy(update={"python": "3.12.1", "monarch": "0.8.0"})

    monkeypatch.setattr(kubernetes, "with_versions", report)
    async with with_hosts(FakeApi()) as hosts:
        assert [host.monarch for host in await hosts.hosts("workers")] == ["0.8.0", ""]


async def test_hosts_that_are_not_ready_in_time_are_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "READY_TIMEOUT", 0.05)
    api = FakeApi()
    api.pods_come_up = False
    async with with_hosts(api) as hosts:
        with pytest.raises(HostsUnavailable, match=r"only 0 of 2 pods of mesh 'workers' were ready after 0.05 s"):
            await hosts.hosts("workers")


async def test_a_deleted_pod_is_a_lost_host_and_its_successor_restores_it() -> None:
    api = FakeApi()
    async with with_hosts(api) as hosts:
        loop = asyncio.get_running_loop()
        lost: asyncio.Future[tuple[str, str, str]] = loop.create_future()
        restored: asyncio.Future[tuple[str, int, Host]] = loop.create_future()
        hosts.watch(lambda *args: lost.set_result(args), lambda *args: restored.set_result(args))
        await hosts.hosts("workers")
        pod = api.get("Pod", "trainer-workers-1", "team")
        api.delete("Pod", "trainer-workers-1", "team")
        assert await lost == ("workers", "trainer-workers-1", "its pod was deleted")
        assert [host.name for host in hosts.present("workers").values()] == ["trainer-workers-0"]
        assert hosts.replaces_hosts("workers")
        api.create({**pod, "metadata": {**pod["metadata"], "uid": "another"}})
        mesh, rank, host = await restored
        assert (mesh, rank, host.name) == ("workers", 1, "trainer-workers-1")


async def test_the_pod_that_replaces_one_of_a_deployment_has_its_rank_in_later_sessions_too() -> None:
    api, spec = FakeApi(), job(found_mesh())
    for name in ("deployment-b2", "deployment-c3"):
        api.create(of_deployment(name))
    hosts = KubernetesHosts(cast("Api", api), spec, cast("SupervisorLink", Unsupervised()))
    try:
        noticed = Noticed(hosts)
        assert [host.name for host in await hosts.hosts("workers")] == ["deployment-b2", "deployment-c3"]
        api.delete("Pod", "deployment-c3", "team")
        api.create(of_deployment("deployment-a1"))
        *_, (mesh, rank, host) = await noticed.until(2)
        assert (mesh, rank, host.name) == ("workers", 1, "deployment-a1")
        assert [host.name for host in await hosts.hosts("workers")] == ["deployment-b2", "deployment-a1"]
        assert [host.name for host in hosts.present("workers").values()] == ["deployment-b2", "deployment-a1"]
    finally:
        await hosts.close()


def of_deployment(name: str) -> Object:
    made = pod_object(name, owner="ReplicaSet")
    return {**made, "metadata": {**made["metadata"], "namespace": "team", "labels": {"app": "mine"}}}


class Noticed:
    """What a provider reports, in order."""

    def __init__(self, hosts: KubernetesHosts) -> None:
        self.events: list[tuple[object, ...]] = []
        self._changed = asyncio.Event()
        hosts.watch(self._add, self._add)
        hosts.watch_endings(self._add)

    def _add(self, *event: object) -> None:
        self.events.append(event)
        self._changed.set()

    async def until(self, count: int) -> list[tuple[object, ...]]:
        while len(self.events) < count:
            self._changed.clear()
            await self._changed.wait()
        return self.events


PREEMPTED = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "team-b"}
WHY = "its pod is being deleted (PreemptionByScheduler: team-b)"


async def test_there_is_notice_of_a_pod_that_is_being_deleted_before_it_is_lost() -> None:
    api = FakeApi()
    async with with_hosts(api) as hosts:
        noticed = Noticed(hosts)
        await hosts.hosts("workers")
        api.request_deletion("Pod", "trainer-workers-1", "team", 30, conditions=[PREEMPTED])
        assert await noticed.until(1) == [("workers", "trainer-workers-1", WHY, 30.0)]
        api.delete("Pod", "trainer-workers-1", "team")
        assert (await noticed.until(2))[1:] == [("workers", "trainer-workers-1", WHY)]


async def test_a_pod_on_a_node_that_does_not_answer_is_lost_once_its_grace_period_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kubernetes, "LATE", -29.9)
    api = FakeApi()
    async with with_hosts(api) as hosts:
        noticed = Noticed(hosts)
        await hosts.hosts("workers")
        api.request_deletion("Pod", "trainer-workers-1", "team", 30, conditions=[PREEMPTED])
        assert ("workers", "trainer-workers-1", WHY) in await noticed.until(2)


def report_stop(api: FakeApi, name: str, event_name: str = "stop") -> None:
    """As the kubelet of a pod does before it sends SIGTERM to its container."""
    stopped = {"kind": "Pod", "metadata": {"name": name, "uid": f"uid-{name}"}}
    told = event(stopped, "Killing", "Stopping container worker", container="worker")
    api.create({**told, "kind": "Event", "metadata": {"name": event_name, "namespace": "team"}})


STOP = "the kubelet of its node is stopping it (Stopping container worker)"


async def test_there_is_one_notice_of_a_pod_that_its_kubelet_ends_by_itself() -> None:
    api = FakeApi()
    async with with_hosts(api) as hosts:
        noticed = Noticed(hosts)
        await hosts.hosts("workers")
        report_stop(api, "trainer-others-1", "stop of another job's")
        report_stop(api, "trainer-workers-1")
        assert await noticed.until(1) == [("workers", "trainer-workers-1", STOP, 30.0)]
        report_stop(api, "trainer-workers-1", "again")
        report_stop(api, "trainer-workers-0", "stop of another")
        assert (await noticed.until(2))[1:] == [("workers", "trainer-workers-0", STOP, 30.0)]
        api.delete("Pod", "trainer-workers-1", "team")
        assert (await noticed.until(3))[2:] == [("workers", "trainer-workers-1", "its pod was deleted")]


async def test_the_notice_of_a_deletion_is_the_only_one_although_the_events_are_ahead_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api, asked = FakeApi(), asyncio.Event()
    get = api.get
    async with with_hosts(api) as hosts:
        loop = asyncio.get_running_loop()

        def get_deleted(kind: str, *which: str) -> object:
            found = get(kind, *which)
            if kind == "Pod":
                loop.call_soon_threadsafe(asked.set)
                return {**found, "metadata": {**found["metadata"], "deletionTimestamp": "2026-01-01T00:00:30Z"}}
            return found

        noticed = Noticed(hosts)
        await hosts.hosts("workers")
        monkeypatch.setattr(api, "get", get_deleted)
        report_stop(api, "trainer-workers-1")
        await asked.wait()
        await asyncio.gather(*hosts._announcing)
        assert noticed.events == []
        api.request_deletion("Pod", "trainer-workers-1", "team", 30, conditions=[PREEMPTED])
        assert await noticed.until(1) == [("workers", "trainer-workers-1", WHY, 30.0)]


@pytest.mark.parametrize(
    "parent",
    ["is gone", "is being deleted", Forbidden("get", "configmaps", "team"), Unauthenticated("no account")],
    ids=str,
)
async def test_there_is_no_notice_of_pods_that_end_with_their_job(
    parent: str | KubernetesError, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, asked = FakeApi(), asyncio.Event()
    get = api.get

    def notes(loop: asyncio.AbstractEventLoop) -> Callable[..., object]:
        def get_and_note(kind: str, *which: str) -> object:
            if kind == "ConfigMap":
                loop.call_soon_threadsafe(asked.set)
                if isinstance(parent, KubernetesError):  # the gateway's role or account has been deleted already
                    raise parent
            return get(kind, *which)

        return get_and_note

    async with with_hosts(api) as hosts:
        noticed = Noticed(hosts)
        await hosts.hosts("workers")
        if parent == "is gone":
            api.drop_alone("ConfigMap", Names("trainer").parent, "team")
        else:
            api.request_deletion("ConfigMap", Names("trainer").parent, "team")
        monkeypatch.setattr(api, "get", notes(asyncio.get_running_loop()))
        api.request_deletion("Pod", "trainer-workers-1", "team")
        await asked.wait()
        await asyncio.gather(*hosts._announcing)
        api.delete("Pod", "trainer-workers-1", "team")
        assert await noticed.until(1) == [("workers", "trainer-workers-1", "its pod is being deleted")]


async def test_a_further_server_reports_the_hosts_that_were_lost_and_replaced_meanwhile() -> None:
    api, supervisor = FakeApi(), Unsupervised()
    events: list[tuple[object, ...]] = []
    changed = asyncio.Event()

    def on_event(*args: object) -> None:
        events.append(args)
        changed.set()

    async with with_hosts(api, supervisor) as hosts:
        await hosts.hosts("workers")
    pod = api.get("Pod", "trainer-workers-1", "team")
    api.delete("Pod", "trainer-workers-1", "team")
    api.create({**pod, "metadata": {**pod["metadata"], "uid": "another"}})
    async with with_hosts(api, supervisor, on_event):
        while len(events) < 2:
            changed.clear()
            await changed.wait()
    lost, (mesh, rank, host) = events
    assert lost == ("workers", "trainer-workers-1", "its pod was deleted")
    assert (mesh, rank, cast("Host", host).name) == ("workers", 1, "trainer-workers-1")


@pytest.fixture(params=["127.0.0.1", "::1"])
def pod(request: pytest.FixtureRequest) -> Iterator[Host]:
    """The processes of a pod, on this machine."""
    ip, port = request.param, free_port(VERSIONS_PORT_OFFSET)
    if ip == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    command = [sys.executable, "-c", WORKER_BOOTSTRAP, f"tcp://{ip}:{port}@tcp://0.0.0.0:{port}"]
    environment = {**os.environ, "POD_IP": ip}
    process = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        yield Host(name="workers-0", address=f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def test_a_host_that_reports_nothing_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "TIMEOUT", 0.2)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(replies.pop())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1] - VERSIONS_PORT_OFFSET
    host = Host(name="workers-0", address=f"tcp://127.0.0.1:{port}")
    replies = [b"", b"HTTP/1.1 400\r\n", b"{}\n", b'{"python":1}\n']
    while replies:
        assert await with_versions(host) == host
    server.close()
    assert await with_versions(host) == host


def test_a_pod_reports_its_versions(pod: Host) -> None:
    def reported() -> Host | None:
        found = asyncio.run(with_versions(pod))
        return None if found == pod else found

    found = wait_for(reported, "the versions of a pod")
    assert found is not None
    assert (found.python, found.monarch) == (platform.python_version(), monarch_version())


def test_a_worker_listens_at_the_address_of_its_pod(pod: Host) -> None:
    def is_up() -> bool:
        place = urlsplit(pod.address)
        with contextlib.suppress(OSError), socket.create_connection((place.hostname or "", place.port or 0)):
            return True
        return False

    wait_for(is_up, "the worker")


def scaled(api: FakeApi, hosts: int) -> JobSpec:
    """The job with so many hosts, of which those that are new are ready."""
    api.merge_patch("StatefulSet", "trainer-workers", "team", {"spec": {"replicas": hosts}})
    return with_sizes(job(), {"workers": hosts})


async def test_hosts_that_a_scaled_mesh_no_longer_has_are_removed_and_not_lost() -> None:
    api = FakeApi()
    async with with_hosts(api) as hosts:
        noticed = Noticed(hosts)
        removed: list[tuple[str, str, str]] = []
        hosts.watch_removals(lambda *args: removed.append(args))
        await hosts.hosts("workers")
        hosts.resize(with_sizes(job(), {"workers": 1}))
        assert removed == [("workers", "trainer-workers-1", kubernetes.REMOVED)]
        assert hosts.meshes() == {"workers": 1}
        assert [host.name for host in hosts.present("workers").values()] == ["trainer-workers-0"]
        assert [host.name for host in await hosts.hosts("workers")] == ["trainer-workers-0"]
        scaled(api, 1)
        api.delete("Pod", "trainer-workers-0", "team")  # a loss that is reported, unlike that of the pod before
        assert await noticed.until(1) == [("workers", "trainer-workers-0", "its pod was deleted")]
        assert len(removed) == 1


async def test_a_mesh_that_grows_waits_for_its_new_hosts_and_restores_one_that_it_had_before() -> None:
    api, supervisor = FakeApi(), Unsupervised()
    async with with_hosts(api, supervisor) as hosts:
        noticed = Noticed(hosts)
        await hosts.hosts("workers")
        hosts.resize(scaled(api, 1))
        wait_for(lambda: len(hosts._pods(job().meshes[0])) == 1, "the watch to see that the pod is gone")
        api.pods_come_up = False
        spec = scaled(api, 3)
        assert [host.name for host in await hosts.hosts("workers")] == ["trainer-workers-0"]  # the gateway knows of one
        hosts.resize(spec)
        grown = asyncio.create_task(hosts.hosts("workers"))
        done, _ = await asyncio.wait([grown], timeout=0)
        assert not done
        api.bring_up()
        assert [host.name for host in await grown] == [f"trainer-workers-{rank}" for rank in range(3)]
        ((mesh, rank, host),) = await noticed.until(1)
        assert isinstance(host, Host)
        assert (mesh, rank, host.name) == ("workers", 1, "trainer-workers-1")
        assert [*supervisor.kept[f"{kubernetes.KEPT}workers"].note] == ["0", "1", "2"]
        hosts.resize(with_sizes(job(), {"workers": 2}))
        hosts.resize(spec)  # the pods were ready before
        assert [event[:2] for event in noticed.events] == [("workers", 1), ("workers", 2)]
