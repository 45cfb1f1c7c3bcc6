"""Jobs that start while the connections of their callers are cut."""

from __future__ import annotations

import asyncio
import threading
from typing import NoReturn

import pytest
from websockets.asyncio.client import ClientConnection

from meshgate_gateway.provisioning import pending_jobs
from meshgate_gateway.provisioning.pending_jobs import PendingJobs
from meshgate_kubernetes.errors import KubernetesError
from meshgate_kubernetes.jobs.provisioning_messages import (
    JobUp,
    ProvisioningReply,
    StartJob,
)
from meshgate_kubernetes.status import readiness
from tests.clusters.kubernetes.fake_api import FakeApi
from tests.gateway.provisioning.provisioning_gateway import (
    CREATED_KINDS,
    dial,
    fake_api,
    replies,
    requested_job,
    start_job,
    with_gateway,
)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    monkeypatch.setattr(readiness, "HEARTBEAT", 0.05)
    return fake_api()


def test_pings_are_answered_while_a_job_starts(api: FakeApi) -> None:
    api.pods_come_up = False

    async def test(url: str) -> None:
        async with dial(url, "alices") as connection:
            await start_job(connection, requested_job())
            await (await connection.ping())
            api.bring_up()
            assert isinstance((await replies(connection))[-1], JobUp)

    with_gateway(api, test)


def test_a_caller_that_reconnects_and_repeats_its_request_gets_the_same_job(api: FakeApi) -> None:
    api.pods_come_up = False

    async def test(url: str) -> ProvisioningReply:
        async with dial(url, "alices") as first:
            await start_job(first, requested_job())
            first.transport.abort()
        async with dial(url, "alices") as second:
            await start_job(second, requested_job())
            api.bring_up()
            return (await replies(second))[-1]

    assert isinstance(with_gateway(api, test), JobUp)
    assert api.made == CREATED_KINDS


def test_a_job_that_became_ready_while_its_caller_was_disconnected_is_kept(api: FakeApi) -> None:
    api.pods_come_up = False

    async def test(url: str) -> ProvisioningReply:
        async with dial(url, "alices") as first:
            await start_job(first, requested_job())
            first.transport.abort()
        api.bring_up()
        async with dial(url, "alices") as second:
            await second.send(StartJob(job=requested_job()).model_dump_json())
            return (await replies(second))[-1]

    assert isinstance(with_gateway(api, test), JobUp)
    assert ("ConfigMap", "team", "trainer") in api.left()


@pytest.mark.parametrize("closes", [True, False])
def test_a_job_is_deleted_if_its_caller_closes_or_does_not_return(
    api: FakeApi, closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.pods_come_up = False
    monkeypatch.setattr(pending_jobs, "RECONNECT_TIMEOUT", 0.2)

    async def test(url: str) -> None:
        async with dial(url, "alices") as connection:
            await start_job(connection, requested_job())
            if not closes:
                connection.transport.abort()
        await asyncio.to_thread(api.wait_empty)

    with_gateway(api, test)


def test_closing_the_gateway_deletes_pending_jobs(api: FakeApi) -> None:
    api.pods_come_up = False

    async def test(url: str) -> ClientConnection:
        connection = await dial(url, "alices")
        await start_job(connection, requested_job())
        return connection

    with_gateway(api, test)
    assert api.left() == []


def test_a_caller_that_is_back_has_no_time_limit() -> None:
    class Connection:
        """A connection that ends when ``cut`` is set."""

        closed_by_peer = False

        def __init__(self) -> None:
            self.cut = asyncio.Event()

        async def wait_closed(self) -> None:
            await self.cut.wait()

        async def send(self, text: str) -> bool:
            return not self.cut.is_set()

    async def test() -> None:
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

    asyncio.run(test())
