"""Hosts that end and come back."""

from __future__ import annotations

import asyncio

import pytest

from meshgate_gateway.engine.failures import RequestFailed
from meshgate_gateway.engine.interfaces import CONTROL_STREAM
from meshgate_gateway.engine.meshes import host_watch
from meshgate_gateway.engine.meshes.host_watch import HostWatch
from meshgate_gateway.engine.objects.records import AVAILABLE, HostMesh, attached_hosts
from meshgate_gateway.engine.objects.regions import hosts_region
from meshgate_gateway.engine.objects.table import ObjectTable
from meshgate_wire.handshake import monarch_version
from meshgate_wire.messages import Host, HostEnding, HostsAttached
from tests.gateway.engine.fakes import Sent, host_mesh, proc_mesh, turns

HOSTS, PROCS = 1, 2
REPLACEMENT = Host(name="workers-1b", address="tcp://10.0.0.9:1")


class Watched:
    """Two attached hosts, and what their listener is notified of."""

    def __init__(self) -> None:
        self.objects, self.sent = ObjectTable(), Sent()
        self.events: list[tuple[str, str]] = []
        self.watch = HostWatch(self.objects, self.sent, self, lambda: "the laptop has Python 3.10.4")
        self.hosts = host_mesh()
        self.objects.add(HOSTS, self.hosts)

    def hosts_attached(self, hosts: HostMesh) -> None:
        self.events.append(("attached", hosts.name))

    def host_lost(self, name: str, reason: str) -> None:
        self.events.append(("lost", name))

    def host_replaced(self, name: str) -> None:
        self.events.append(("replaced", name))


async def test_a_lost_host_is_remembered_by_name_and_by_address() -> None:
    watched = Watched()
    watched.watch.host_lost("workers-1", "OOMKilled")
    assert watched.watch.reasons == {"workers-1": "OOMKilled"}
    assert watched.watch.ended == {"tcp://10.0.0.1:1"}
    assert watched.events == [("lost", "workers-1")]


@pytest.mark.parametrize("returns", [True, False])
async def test_a_mesh_that_is_attached_to_later_has_the_lost_host_as_missing(returns: bool) -> None:
    watched = Watched()
    watched.watch.host_lost("workers-1", "OOMKilled", returns=True)
    watched.watch.host_lost("workers-1", "evicted", returns=returns)
    watched.watch.host_lost("others-1", "evicted", returns=returns)
    for name in ("workers", "others"):
        later = host_mesh(name=name)
        watched.watch.mark_lost(later)
        assert later.missing == {f"{name}-1": AVAILABLE.lost("evicted", returns=returns)}
    assert watched.watch.ended == {"tcp://10.0.0.1:1"}


async def test_processes_that_are_coming_up_on_a_lost_host_are_given_up() -> None:
    watched = Watched()
    here, elsewhere = proc_mesh(watched.hosts), proc_mesh(host_mesh(name="others"))
    for number, procs in enumerate((here, elsewhere), PROCS):
        procs.initialized = asyncio.get_running_loop().create_future()
        watched.objects.add(number, procs)
    watched.watch.host_lost("workers-1", "OOMKilled")
    assert here.initialized is not None
    assert elsewhere.initialized is not None
    assert (here.initialized.cancelled(), elsewhere.initialized.cancelled()) == (True, False)
    assert (here.lost_hosts, elsewhere.lost_hosts) == ({"workers-1"}, set())


async def test_processes_on_other_hosts_are_given_up_if_not_all_hosts_had_answered() -> None:
    watched = Watched()
    watched.hosts.attaching = asyncio.get_running_loop().create_future()
    procs = proc_mesh(watched.hosts)
    procs.host_names = ("workers-0",)
    procs.initialized = asyncio.get_running_loop().create_future()
    watched.objects.add(PROCS, procs)
    watched.watch.host_lost("workers-1", "evicted", returns=True)
    watched.watch.host_back("workers", 1, REPLACEMENT)  # before the spawn has looked for missing hosts
    assert procs.initialized.cancelled()
    assert "workers-1: evicted" in procs.given_up


async def test_a_replaced_host_completes_its_mesh_for_the_client_and_the_listener() -> None:
    watched = Watched()
    watched.watch.host_lost("workers-1", "evicted", returns=True)
    watched.watch.host_back("workers", 1, REPLACEMENT)
    assert watched.watch.reasons == {}
    assert watched.events == [("lost", "workers-1"), ("replaced", "workers-1"), ("attached", "workers")]
    (attached,) = watched.sent.of(HostsAttached)
    assert (attached.object, [host.name for host in attached.hosts]) == (HOSTS, ["workers-0", "workers-1b"])


async def test_a_mesh_with_other_hosts_missing_is_not_reported_as_attached() -> None:
    watched = Watched()
    for name in watched.hosts.names:
        watched.watch.host_lost(name, "evicted", returns=True)
    watched.watch.host_back("workers", 1, REPLACEMENT)
    assert watched.sent.messages == []
    assert ("attached", "workers") not in watched.events


async def test_a_host_back_at_its_old_address_is_not_reported_as_attached() -> None:
    watched = Watched()
    watched.watch.host_lost("workers-1", "evicted", returns=True)
    watched.watch.host_back("workers", 1, watched.hosts.hosts[1])
    assert watched.sent.messages == []
    assert watched.events == [("lost", "workers-1")]
    assert "restarted at its old address" in watched.hosts.missing_among(["workers-1"])


async def test_hosts_of_other_meshes_are_left_alone() -> None:
    watched = Watched()
    watched.watch.host_lost("others-0", "evicted")
    watched.watch.host_back("others", 0, REPLACEMENT)
    watched.watch.host_back("workers", 2, REPLACEMENT)
    assert watched.hosts.names == ("workers-0", "workers-1")
    assert watched.hosts.missing == {}


# --- waiting for hosts


async def test_waiting_ends_when_the_last_missing_host_is_back() -> None:
    watched = Watched()
    watched.watch.host_lost("workers-0", "evicted", returns=True)
    watched.watch.host_lost("workers-1", "evicted", returns=True)
    waiting = asyncio.ensure_future(watched.watch.wait_available(watched.hosts, None))
    await turns()
    watched.watch.host_back("workers", 1, REPLACEMENT)
    await turns()
    assert not waiting.done()
    watched.watch.host_back("workers", 0, Host(name="workers-0", address="tcp://10.0.0.8:1"))
    await waiting


async def test_waiting_for_a_slice_ignores_hosts_outside_it() -> None:
    watched = Watched()
    watched.watch.host_lost("workers-1", "evicted", returns=True)
    await watched.watch.wait_available(watched.hosts, hosts_region(1))


async def test_waiting_fails_as_soon_as_a_host_is_lost_for_good() -> None:
    watched = Watched()
    watched.watch.host_lost("workers-1", "its pod was deleted", returns=True)
    waiting = asyncio.ensure_future(watched.watch.wait_available(watched.hosts, None))
    await turns()
    watched.watch.host_lost("workers-1", "its StatefulSet was deleted")
    with pytest.raises(RequestFailed, match="workers-1: its StatefulSet was deleted") as caught:
        await waiting
    assert caught.value.failure.step == "workers.initialized"


async def test_waiting_fails_for_a_host_that_restarted_at_its_old_address() -> None:
    watched = Watched()
    watched.watch.host_lost("workers-1", "evicted", returns=True)
    watched.watch.host_back("workers", 1, watched.hosts.hosts[1])
    with pytest.raises(RequestFailed, match="start a new session to use it"):
        await watched.watch.wait_available(watched.hosts, None)


async def test_waiting_fails_when_a_host_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_watch, "RETURN_TIMEOUT", 0.01)
    watched = Watched()
    watched.watch.host_lost("workers-1", "evicted", returns=True)
    with pytest.raises(RequestFailed, match="workers-1: evicted"):
        await watched.watch.wait_available(watched.hosts, None)


async def test_a_further_server_that_reports_the_same_again_changes_nothing() -> None:
    watched = Watched()
    for _ in range(2):
        watched.watch.host_lost("workers-1", "evicted", returns=True)
    for _ in range(2):
        watched.watch.host_back("workers", 1, REPLACEMENT)
    assert watched.events == [("lost", "workers-1"), ("replaced", "workers-1"), ("attached", "workers")]
    watched.watch.host_lost(REPLACEMENT.name, "evicted", returns=True)
    watched.watch.host_back("workers", 1, REPLACEMENT)
    assert watched.events[3:] == [("lost", REPLACEMENT.name)]
    assert REPLACEMENT.name not in watched.watch.reasons


async def test_a_mesh_with_a_host_that_refuses_is_given_up_and_names_the_versions() -> None:
    watched = Watched()
    procs = proc_mesh(watched.hosts)
    watched.objects.add(PROCS, procs)
    procs.initialized = asyncio.get_running_loop().create_future()
    waiting = asyncio.get_running_loop().create_future()
    watched.hosts.waits[waiting] = None
    await watched.watch.refused("tcp://10.0.0.1:1")
    assert (procs.initialized.cancelled(), waiting.cancelled()) == (True, True)
    assert watched.events == [("lost", "workers-0"), ("lost", "workers-1")]
    refusal = watched.hosts.missing_among([])
    assert refusal.startswith(
        "cannot attach to mesh 'workers': worker workers-1 (tcp://10.0.0.1:1) answers, but not as"
    )
    assert (
        f"than the gateway, {monarch_version()}, or serves another address; the laptop has Python 3.10.4. `pip show"
        in refusal
    )
    with pytest.raises(RequestFailed, match="another release of torchmonarch"):
        await watched.watch.wait_available(watched.hosts, None)


class LastFirst(asyncio.Future[None]):
    """A future that comes before earlier ones in a set."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def __hash__(self) -> int:
        return -self.number


async def test_the_waits_for_a_lost_host_end_in_the_order_in_which_they_began() -> None:
    watched, ended = Watched(), list[int]()
    watched.hosts.attaching = asyncio.get_running_loop().create_future()
    for number in range(2, 6):
        wait = LastFirst(number)
        wait.add_done_callback(lambda wait: ended.append(wait.number))
        watched.hosts.waits[wait] = None
    watched.watch.host_lost("workers-1", "evicted")
    await turns()
    assert ended == [2, 3, 4, 5]


async def test_a_refusing_host_with_a_name_is_found_by_its_address() -> None:
    watched = Watched()
    named = Host(name="named", address="tcp://localhost:7@tcp://0.0.0.0:7", identity="pod-1")
    watched.objects.add(PROCS, other := attached_hosts(None, "named", [Host(name="", address=""), named]))
    await watched.watch.refused("tcp://127.0.0.1:8")
    assert (watched.hosts.refused, other.refused) == ("", "")
    await watched.watch.refused("tcp://127.0.0.1:7")
    assert "worker named (tcp://localhost:7@tcp://0.0.0.0:7) answers" in other.refused
    assert ", or another identity than 'pod-1', or serves" in other.refused
    assert watched.hosts.refused == ""


async def test_the_client_has_one_notice_of_a_host_that_is_about_to_end() -> None:
    watched = Watched()
    assert watched.watch.host_ending("workers-1", "drained", 30.0)
    assert not watched.watch.host_ending("workers-1", "drained", 20.0)  # by a server that has taken over
    assert not watched.watch.host_ending("others-1", "drained", 30.0)
    ((notice, stream, _),) = watched.sent.messages
    assert isinstance(notice, HostEnding)
    assert (stream, notice.object, notice.host, notice.reason) == (CONTROL_STREAM, HOSTS, "workers-1", "drained")
    assert 20 < notice.seconds <= 30
    assert (watched.watch.reasons, dict(watched.watch.explained)) == ({}, {"workers-1": "drained"})
    watched.watch.host_lost("workers-1", "it was drained", returns=True)
    assert dict(watched.watch.explained) == {"workers-1": "it was drained"}


async def test_a_replacement_repeats_the_notices_of_other_hosts() -> None:
    watched = Watched()
    for name in watched.hosts.names:
        watched.watch.host_ending(name, "drained", 30.0)
    watched.watch.host_lost("workers-1", "it was drained", returns=True)
    del watched.sent.messages[:]
    watched.watch.host_back("workers", 1, REPLACEMENT)
    attached, notice = (header for header, *_ in watched.sent.messages)
    assert isinstance(attached, HostsAttached)
    assert isinstance(notice, HostEnding)
    assert notice.host == "workers-0"


async def test_waiting_for_hosts_waits_for_the_replacement_of_one_that_is_about_to_end() -> None:
    watched = Watched()
    watched.watch.host_ending("workers-1", "drained", 30.0)
    waiting = asyncio.ensure_future(watched.watch.wait_available(watched.hosts, None))
    await asyncio.wait_for(watched.watch.wait_available(watched.hosts, hosts_region(1)), 10)
    await turns()
    assert not waiting.done()
    watched.watch.host_lost("workers-1", "it was drained", returns=True)
    await turns()
    assert not waiting.done()
    watched.watch.host_back("workers", 1, Host(name="workers-1", address="tcp://10.0.0.9:1"))  # as of a StatefulSet
    await asyncio.wait_for(waiting, 10)


async def test_hosts_that_take_too_long_to_end_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_watch, "RETURN_TIMEOUT", -1.0)
    watched = Watched()
    watched.watch.host_ending("workers-1", "drained", 0.0)
    with pytest.raises(RequestFailed, match=r"mesh 'workers' has hosts that are about to end \(workers-1: drained\)"):
        await watched.watch.wait_available(watched.hosts, None)


async def test_the_time_in_which_hosts_must_return_begins_when_they_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_watch, "RETURN_TIMEOUT", -1.0)
    watched = Watched()
    watched.watch.host_ending("workers-1", "drained", 3600.0)
    waiting = asyncio.ensure_future(watched.watch.wait_available(watched.hosts, None))
    await turns()
    assert not waiting.done()
    watched.watch.host_lost("workers-1", "it was drained", returns=True)
    watched.watch.host_back("workers", 1, REPLACEMENT)
    await asyncio.wait_for(waiting, 10)


async def test_the_end_of_the_job_is_that_of_every_host_until_it_is_withdrawn() -> None:
    watched = Watched()
    watched.objects.add(PROCS, attached_hosts(None, "returned", [Host(name="")]))  # by an endpoint
    watched.watch.host_lost("workers-0", "OOMKilled")
    watched.watch.job_ending("", None)
    assert watched.sent.messages == []
    watched.watch.job_ending("its time limit", 30.0)
    ((notice, _, _),) = watched.sent.messages
    assert (notice.object, notice.host, notice.reason) == (HOSTS, "workers-1", "its time limit")
    assert 20 < notice.seconds <= 30
    assert watched.watch.end_of("workers-0") is None
    attached, described = watched.watch.described(HOSTS, watched.hosts)  # as for a client that takes the session over
    assert isinstance(attached, HostsAttached)
    assert isinstance(described, HostEnding)
    del watched.sent.messages[:]
    watched.watch.job_ending("", None)
    assert watched.sent.of(HostsAttached)[0] == HostsAttached(object=HOSTS, hosts=watched.hosts.hosts)
    assert watched.sent.of(HostEnding) == []
    assert watched.watch.end_of("workers-1") is None


async def test_hosts_that_end_with_the_job_are_not_waited_for() -> None:
    watched = Watched()
    watched.watch.job_ending("its time limit", 30.0)
    await watched.watch.wait_available(watched.hosts, None)


async def test_a_host_that_was_removed_from_its_mesh_is_not_waited_for_until_the_mesh_has_it_again() -> None:
    watched = Watched()
    watched.watch.host_lost("workers-1", "job.scale() has removed it", removed=True)
    assert watched.events == [("replaced", "workers-1")]
    with pytest.raises(RequestFailed, match=r"workers-1: job\.scale"):
        await watched.watch.wait_available(watched.hosts, None)
    watched.watch.host_back("workers", 1, watched.hosts.hosts[1].model_copy(update={"address": "tcp://10.0.0.9:1"}))
    assert watched.events == [("replaced", "workers-1"), ("attached", "workers")]
    assert watched.watch.reasons == {}
    await watched.watch.wait_available(watched.hosts, None)
