from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from meshgate_gateway.engine.failures import RequestFailed
from meshgate_gateway.engine.meshes.controllers import Controllers, answer
from meshgate_gateway.engine.objects.records import ActorMesh
from meshgate_gateway.engine.objects.table import ObjectTable
from meshgate_wire import Fragments
from meshgate_wire.messages import Failure, GetControllers, SpawnActors, SpawnProcs
from tests.gateway.engine.fakes import FakeMonarch, actor_mesh, async_test, host_mesh, turns


class Kept:
    """A session with two hosts. As ``controllers.Spawner`` it creates meshes at once."""

    def __init__(self, *, attached: bool = True) -> None:
        self.monarch, self.objects = FakeMonarch(), ObjectTable()
        self.hosts = host_mesh()
        if attached:
            self.objects.add(1, self.hosts)
        self.latest_code: tuple[str | None, tuple[str, ...]] = ("v2", ())
        self.spawned: list[SpawnProcs] = []
        self.controllers = Controllers(self.objects, self.monarch, self)

    async def spawn_procs(self, header: SpawnProcs, buffers: Sequence[Fragments]) -> None:
        self.spawned.append(header)

    async def spawn_actors(self, header: SpawnActors, buffers: Sequence[Fragments]) -> None:
        assert buffers[0].join() == self.monarch.controllers_class
        self.objects.add(header.object, actor_mesh(name=header.name))

    async def get(self, number: int, hosts: int = 0) -> ActorMesh:
        header = GetControllers(object=number, hosts=hosts, version="v1")
        await self.controllers.handlers()[GetControllers](header, ())  # type: ignore[misc]
        made = self.objects.require(number)
        assert isinstance(made, ActorMesh)
        return made


@async_test
async def test_the_controllers_are_spawned_once_on_the_first_host() -> None:
    kept = Kept()
    first, second = await kept.get(5), await kept.get(6)
    assert await kept.controllers.dump() == b"controllers with []"
    assert first is second
    (spawned,) = kept.spawned
    assert (spawned.version, spawned.hosts.object, spawned.per_host) == ("v1", 1, {})
    assert spawned.hosts.region is not None
    assert (spawned.hosts.region.offset, spawned.hosts.region.sizes) == (0, ())


@async_test
async def test_controllers_wait_for_hosts_that_are_being_attached() -> None:
    kept = Kept(attached=False)
    getting = asyncio.ensure_future(kept.get(5, hosts=1))
    await turns()
    assert not getting.done()
    kept.objects.add(1, kept.hosts)
    assert (await getting).name == "controllers"


@async_test
async def test_controllers_are_spawned_on_other_hosts_if_these_cannot_be_attached() -> None:
    kept = Kept()
    kept.objects.add(2, Failure(kind="invalid", message="no such mesh"))
    assert (await kept.get(5, hosts=2)).name == "controllers"


@async_test
async def test_controllers_that_died_are_spawned_again() -> None:
    kept = Kept()
    first = await kept.get(5)
    first.dead[0] = "killed"
    assert await kept.get(6) is not first
    assert len(kept.spawned) == 2


@async_test
async def test_a_session_without_available_hosts_has_no_controllers() -> None:
    kept = Kept()
    kept.hosts.host_lost(kept.hosts.names[0], "evicted", returns=False)
    with pytest.raises(RequestFailed, match="no host for controllers"):
        await kept.get(5)
    assert (await answer(kept.controllers.dump)()).startswith(b"-there is no host for controllers")
