from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from meshgate_gateway.control import HostsReply, HostsRequest
from meshgate_gateway.engine.failures import RequestFailed
from meshgate_gateway.engine.meshes.attaching import Attaching, HostRequests
from meshgate_gateway.engine.objects.records import ActorMesh, Channel, HostMesh, ProcMesh
from meshgate_gateway.engine.objects.regions import hosts_region
from meshgate_gateway.engine.objects.table import Lookup, ObjectTable
from meshgate_wire import Fragments
from meshgate_wire.messages import Adopt, AttachHosts, Host, HostsAttached, MeshRef
from tests.gateway.engine.fakes import FakeMonarch, Sent, host_mesh, proc_mesh, turns

FOUND = [Host(name=f"workers-{rank}", address=f"tcp://10.0.0.{rank}:1") for rank in range(2)]


class Attached:
    def __init__(self, *ended: str) -> None:
        self.monarch, self.objects, self.sent = FakeMonarch(), ObjectTable(), Sent()
        self.found, self.lost = FOUND, ""
        self.notified: list[HostMesh] = []
        self.watched: list[tuple[int, ProcMesh]] = []
        lookup = Lookup(self.objects, self.monarch)
        self.attaching = Attaching(
            self.objects,
            lookup,
            self.monarch,
            self.sent,
            find_hosts=self._find,
            mark_lost=self._mark_lost,
            ended=set(ended),
            hosts_attached=self.notified.append,
            described=lambda number, hosts: [HostsAttached(object=number, hosts=hosts.hosts)],
            watch=lambda number, procs: self.watched.append((number, procs)),
        )

    async def _find(self, mesh: str) -> Sequence[Host]:
        return self.found

    def _mark_lost(self, hosts: HostMesh) -> None:
        if self.lost:
            hosts.host_lost(self.lost, "OOMKilled", returns=False)

    async def adopt(self, header: Adopt, *buffers: bytes) -> object:
        await self.attaching.adopt(header, [Fragments((data,)) for data in buffers])
        return self.objects.get(header.object)


async def test_attached_hosts_are_sent_to_the_client_and_reported() -> None:
    attached = Attached()
    await attached.attaching.attach(AttachHosts(object=1, mesh="workers"), ())
    assert attached.monarch.attached == [("workers", ["tcp://10.0.0.0:1", "tcp://10.0.0.1:1"])]
    assert attached.sent.of(HostsAttached) == [HostsAttached(object=1, hosts=tuple(FOUND))]
    assert attached.notified == [attached.objects.get(1)]


async def test_an_address_that_this_session_has_lost_cannot_be_attached_to_again() -> None:
    attached = Attached("tcp://10.0.0.1:1")
    expected = (
        "cannot attach to mesh 'workers': workers-1: the host has restarted at its old address; start a new session"
    )
    with pytest.raises(RequestFailed, match=expected):
        await attached.attaching.attach(AttachHosts(object=1, mesh="workers"), ())
    assert attached.monarch.attached == []


async def test_a_host_that_is_lost_already_is_attached_to_as_missing() -> None:
    attached = Attached("tcp://10.0.0.1:1")
    attached.lost = "workers-1"
    await attached.attaching.attach(AttachHosts(object=1, mesh="workers"), ())
    assert attached.monarch.attached == [("workers", ["tcp://10.0.0.0:1"])]
    hosts = attached.objects.get(1)
    assert isinstance(hosts, HostMesh)
    assert hosts.missing_among(["workers-0"]) == ""
    assert "has lost hosts (workers-1: OOMKilled)" in hosts.missing_among(hosts.names)
    attached.lost = "workers-0"
    with pytest.raises(RequestFailed, match="workers-1: the host has restarted at its old address"):
        await attached.attaching.attach(AttachHosts(object=2, mesh="workers"), ())


async def test_a_host_of_another_release_is_refused_with_the_versions_of_all_three() -> None:
    attached = Attached()
    attached.found = [FOUND[0], FOUND[1].model_copy(update={"python": "3.9.1", "monarch": "9"})]
    attached.monarch.same_versions.laptop = lambda: "the laptop has Python 3.10.4 and no torchmonarch"
    expected = r"worker workers-1 has Python 3\.9\.1 and torchmonarch 9, the gateway has .* the laptop has Python 3\.10"
    with pytest.raises(RequestFailed, match=expected):
        await attached.attaching.attach(AttachHosts(object=1, mesh="workers"), ())
    assert attached.monarch.attached == []


async def test_a_port_that_arrives_is_adopted_by_its_address() -> None:
    attached = Attached()
    channel = await attached.adopt(Adopt(object=-1, kind="port", address="port@rank1"))
    assert isinstance(channel, Channel)
    assert channel.port == "port@rank1"


async def test_meshes_that_arrive_are_adopted_with_the_meshes_they_are_on() -> None:
    attached = Attached()
    attached.objects.add(1, host_mesh())
    attached.objects.add(2, parent := proc_mesh())
    for _ in range(3):
        attached.objects.add_reference(object())
    region = hosts_region(2)
    hosts = await attached.adopt(Adopt(object=-1, kind="hosts", name="spare", region=region))
    procs = await attached.adopt(Adopt(object=-2, kind="procs", region=region, parent=MeshRef(object=1)))
    actors = await attached.adopt(
        Adopt(object=-3, kind="actors", name="actors", region=region, parent=MeshRef(object=2)), b"class"
    )
    assert isinstance(hosts, HostMesh)
    assert (hosts.names, hosts.addresses) == (("", ""), ("", ""))
    assert isinstance(procs, ProcMesh)
    assert procs.host_names == ()
    assert isinstance(actors, ActorMesh)
    assert (actors.procs, actors.class_data) == (parent, (b"class",))
    assert attached.watched == [(2, parent)]


async def test_actors_that_arrive_have_the_dead_ranks_of_their_processes() -> None:
    attached = Attached()
    attached.objects.add(2, proc_mesh())
    attached.attaching._watch = lambda number, procs: procs.dead.update({1: "ended"}, stopped=True)
    attached.objects.add_reference(object())
    header = Adopt(object=-1, kind="actors", name="actors", region=hosts_region(2), parent=MeshRef(object=2))
    actors = await attached.adopt(header, b"class")
    assert isinstance(actors, ActorMesh)
    assert actors.dead == {1: "ended"}
    assert actors.dead.stopped == {1}


async def test_a_mesh_cannot_be_adopted_without_its_region_or_without_having_arrived() -> None:
    attached = Attached()
    number = attached.objects.add_reference(object())
    with pytest.raises(RequestFailed, match="does not contain the region of the mesh to adopt"):
        await attached.adopt(Adopt(object=number, kind="procs"))
    with pytest.raises(RequestFailed, match="object -2 did not arrive from a worker"):
        await attached.adopt(Adopt(object=-2, kind="procs", region=hosts_region(1)))


async def test_a_mesh_from_inside_a_pickle_brings_its_reference() -> None:
    attached = Attached()
    header = Adopt(object=7, kind="actors", name="actors", region=hosts_region(2), has_reference=True)
    actors = await attached.adopt(header, b"class", b"reference")
    assert isinstance(actors, ActorMesh)
    assert (actors.actors, actors.class_data) == (("actors", b"reference"), (b"class",))
    with pytest.raises(RequestFailed, match="does not contain the reference"):
        await attached.adopt(header.model_copy(update={"object": 8}))


FIRST, SECOND = Host(name="workers-0"), Host(name="workers-1")


async def test_a_reply_in_parts_is_one_list_of_hosts() -> None:
    sent: list[HostsRequest] = []
    requests = HostRequests(sent.append)
    finding = asyncio.ensure_future(requests.find("workers"))
    await turns()
    requests.add_reply(HostsReply(mesh="workers", hosts=(FIRST,), more=True))
    await turns()
    assert not finding.done()
    requests.add_reply(HostsReply(mesh="workers", hosts=(SECOND,)))
    assert await finding == (FIRST, SECOND)
    assert [request.mesh for request in sent] == ["workers"]


async def test_callers_that_ask_for_the_same_mesh_share_a_request() -> None:
    sent: list[HostsRequest] = []
    requests = HostRequests(sent.append)
    first, second = (asyncio.ensure_future(requests.find("workers")) for _ in range(2))
    await turns()
    first.cancel()
    await turns()
    requests.add_reply(HostsReply(mesh="workers", hosts=(FIRST,)))
    await turns()
    assert len(sent) == 1
    assert second.result() == (FIRST,)


async def test_a_mesh_without_hosts_fails_with_the_reason_of_the_server() -> None:
    requests = HostRequests(lambda request: None)
    finding = asyncio.ensure_future(requests.find("workers"))
    await turns()
    requests.add_reply(HostsReply(mesh="workers", error="this job has no mesh 'workers'"))
    with pytest.raises(RequestFailed, match="this job has no mesh 'workers'"):
        await finding


async def test_a_reply_that_was_not_requested_is_ignored_and_the_next_request_asks_again() -> None:
    sent: list[HostsRequest] = []
    requests = HostRequests(sent.append)
    requests.add_reply(HostsReply(mesh="workers", hosts=(FIRST,)))
    finding = asyncio.ensure_future(requests.find("workers"))
    await turns()
    requests.add_reply(HostsReply(mesh="workers", hosts=(SECOND,)))
    assert await finding == (SECOND,)
    assert len(sent) == 1


async def test_a_request_is_repeated_to_another_server_and_the_parts_of_the_last_ones_reply_are_dropped() -> None:
    sent: list[HostsRequest] = []
    requests = HostRequests(sent.append)
    finding = asyncio.ensure_future(requests.find("workers"))
    await turns()
    requests.add_reply(HostsReply(mesh="workers", hosts=(FIRST,), more=True))
    requests.repeat()
    assert [request.mesh for request in sent] == ["workers", "workers"]
    requests.add_reply(HostsReply(mesh="workers", hosts=(FIRST, SECOND)))
    assert await finding == (FIRST, SECOND)
