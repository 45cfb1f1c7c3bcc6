from __future__ import annotations

import asyncio

import pytest

from meshgate_gateway.control.messages import HostsReply, HostsRequest
from meshgate_gateway.engine.failures import RequestFailed
from meshgate_gateway.engine.host_requests import HostRequests
from meshgate_wire.messages import Host
from tests.gateway.engine.fakes import async_test, turns

FIRST, SECOND = Host(name="workers-0"), Host(name="workers-1")


@async_test
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


@async_test
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


@async_test
async def test_a_mesh_without_hosts_fails_with_the_reason_of_the_server() -> None:
    requests = HostRequests(lambda request: None)
    finding = asyncio.ensure_future(requests.find("workers"))
    await turns()
    requests.add_reply(HostsReply(mesh="workers", error="this job has no mesh 'workers'"))
    with pytest.raises(RequestFailed, match="this job has no mesh 'workers'"):
        await finding


@async_test
async def test_a_reply_that_was_not_requested_is_ignored_and_the_next_request_asks_again() -> None:
    sent: list[HostsRequest] = []
    requests = HostRequests(sent.append)
    requests.add_reply(HostsReply(mesh="workers", hosts=(FIRST,)))
    finding = asyncio.ensure_future(requests.find("workers"))
    await turns()
    requests.add_reply(HostsReply(mesh="workers", hosts=(SECOND,)))
    assert await finding == (SECOND,)
    assert len(sent) == 1


@async_test
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
