"""A gateway that nobody visits ends itself, but not while whoever asked for its hosts still waits for them."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from meshgate_gateway import gateway
from meshgate_gateway.hosts import HostProvider
from meshgate_gateway.keeper import Keeper
from meshgate_gateway.kubernetes_hosts import KubernetesHosts
from meshgate_kubernetes import provision
from meshgate_kubernetes.api import Api
from tests.gateway.kubernetes.fake_api import FakeApi
from tests.gateway.kubernetes.objects import job

TIMEOUT = 0.05


class Nobody:
    """A keeper that never had a session."""

    def __init__(self) -> None:
        self.idle_since = asyncio.get_running_loop().time()
        self.changed = asyncio.Event()


class Late:
    def __init__(self) -> None:
        self.there = asyncio.Event()

    async def came_up(self) -> None:
        await self.there.wait()


def idle(hosts: Late) -> asyncio.Task[gateway._End]:
    waiting = gateway._wait_idle(cast("Keeper", Nobody()), cast("HostProvider", hosts), TIMEOUT)
    return asyncio.create_task(waiting)


def test_idleness_counts_from_when_the_hosts_are_there() -> None:
    async def run() -> None:
        hosts = Late()
        waiting = idle(hosts)
        await asyncio.sleep(4 * TIMEOUT)
        assert not waiting.done()
        hosts.there.set()
        assert (await asyncio.wait_for(waiting, 10)).idle

    asyncio.run(run())


def test_hosts_that_never_come_hold_it_up_for_a_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "COMING_UP", 2 * TIMEOUT)

    async def run() -> None:
        assert (await asyncio.wait_for(idle(Late()), 10)).idle

    asyncio.run(run())


def test_pods_have_come_up_when_all_have_been_ready() -> None:
    class Silent:
        def created(self, obj: object) -> None: ...
        def progress(self, progress: object) -> None: ...

    async def run() -> None:
        fake = FakeApi()
        fake.pods_come_up = False
        api, spec = cast("Api", fake), job()
        provision.create_owned(api, spec, provision.create_parent(api, spec), Silent())
        hosts = KubernetesHosts(api, spec)
        try:
            waiting = asyncio.create_task(hosts.came_up())
            await asyncio.sleep(0.1)
            assert not waiting.done()
            fake.bring_up()
            await asyncio.wait_for(waiting, 10)
        finally:
            await hosts.close()

    asyncio.run(run())
