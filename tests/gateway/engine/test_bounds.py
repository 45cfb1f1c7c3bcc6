"""Sizes that come from the network are checked before anything is made of them."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator

import pytest

from meshgate_gateway.engine.objects import MAX_RANKS, RequestFailed, ranks_of, ranks_within, require_reasonable
from meshgate_wire.messages import Adopt, Call, Failed, MeshRef, ObjectFailed, Region, SpawnProcs, Stop, Values
from tests.gateway.engine.in_memory import Laptop, on_a_loop

HUGE = [
    Region(labels=("hosts",), offset=0, sizes=(2**40,), strides=(1,)),
    Region(labels=("hosts",), offset=0, sizes=(2**40,), strides=(0,)),
    Region(labels=tuple(map(str, range(64))), offset=0, sizes=(2**53,) * 64, strides=(0,) * 64),
    Region(labels=("hosts",), offset=2**53, sizes=(1,), strides=(1,)),
    Region(labels=("hosts",), offset=0, sizes=(2,), strides=(2**53,)),
]


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    """What takes gigabytes fails here, where it would have ended the pod."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, before[1]))
    begun = time.monotonic()
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("region", HUGE)
def test_a_region_that_no_mesh_can_have_is_refused_before_its_ranks_are_made(region: Region) -> None:
    whole = Region(labels=("hosts",), offset=0, sizes=(4,), strides=(1,))
    for check in (ranks_of, require_reasonable, lambda region: ranks_within(region, whole, "workers")):
        with pytest.raises(RequestFailed, match=f"a mesh has {MAX_RANKS} ranks at most"):
            check(region)


def test_the_largest_region_is_taken_and_the_next_is_not() -> None:
    assert len(ranks_of(Region(labels=("x",), offset=0, sizes=(MAX_RANKS,), strides=(1,)))) == MAX_RANKS
    with pytest.raises(RequestFailed):
        ranks_of(Region(labels=("x",), offset=0, sizes=(MAX_RANKS + 1,), strides=(1,)))


def test_a_region_without_ranks_has_none() -> None:
    assert ranks_of(Region(labels=("x",), offset=0, sizes=(0,), strides=(2**53,))) == []


def test_a_region_that_is_no_part_is_told_with_both() -> None:
    whole = Region(labels=("hosts", "gpus"), offset=0, sizes=(2, 2), strides=(2, 1))
    part = Region(labels=("gpus",), offset=3, sizes=(2,), strides=(1,))
    with pytest.raises(RequestFailed, match=r"\{gpus: 2\} from rank 3 on is not part of mesh 'workers', which has"):
        ranks_within(part, whole, "workers")


@pytest.mark.parametrize("region", HUGE)
@on_a_loop
async def test_a_call_on_a_huge_part_fails_alone(region: Region) -> None:
    laptop = Laptop()
    actors = laptop.spawn_up()
    for number, huge in ((1, region), (2, None)):
        call = Call(call=number, target=MeshRef(object=actors, region=huge), endpoint="step", adverb="call")
        laptop.send(call, b"arguments", stream=actors)
    laptop.send(Stop(call=3, target=MeshRef(object=actors, region=region)), stream=actors)
    await laptop.settle(until=lambda: len(laptop.of(Failed)) == 2 and laptop.monarch.casts)
    assert {failed.call: failed.failure.kind for failed in laptop.of(Failed)} == {1: "invalid", 3: "invalid"}
    for rank in range(2):
        laptop.monarch.ports[-1].put(b"value", rank)
    await laptop.settle(until=lambda: laptop.of(Values))
    await laptop.end()


@pytest.mark.parametrize("per_host", [{"gpus": 2**16, "more": 2**16}, {str(at): 2**16 for at in range(64)}])
@on_a_loop
async def test_more_processes_than_a_mesh_has_ranks_are_not_spawned(per_host: dict[str, int]) -> None:
    laptop = Laptop()
    hosts, procs = laptop.attach(), laptop.number()
    header = SpawnProcs(object=procs, hosts=MeshRef(object=hosts), per_host=per_host, name="procs")
    laptop.send(header, stream=procs)
    await laptop.settle(until=lambda: laptop.of(ObjectFailed))
    (failed,) = laptop.of(ObjectFailed)
    assert f"a mesh has {MAX_RANKS} ranks in 64 dimensions at most" in failed.failure.message
    await laptop.end()


@pytest.mark.parametrize("kind", ["hosts", "procs", "actors"])
@pytest.mark.parametrize("region", HUGE)
@on_a_loop
async def test_a_huge_mesh_is_not_adopted(region: Region, kind: str) -> None:
    laptop = Laptop()
    number = laptop.engine.objects.arrived(object())
    laptop.send(Adopt(object=number, kind=kind, region=region), stream=2**31 - number)
    await laptop.settle(until=lambda: laptop.of(ObjectFailed))
    assert laptop.of(ObjectFailed)[0].failure.kind == "invalid"
    await laptop.end()
