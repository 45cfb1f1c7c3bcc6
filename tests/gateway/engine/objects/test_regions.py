"""Region arithmetic, and the limits that hold before memory is allocated."""

from __future__ import annotations

import pytest

from meshgate_gateway.engine.failures import RequestFailed
from meshgate_gateway.engine.objects.regions import (
    MAX_RANKS,
    check_size,
    describe,
    hosts_region,
    procs_region,
    ranks_of,
    ranks_within,
)
from meshgate_wire.messages import Region
from tests.gateway.engine.oversized import OVERSIZED, limited_memory

__all__ = ["limited_memory"]

pytestmark = pytest.mark.usefixtures("limited_memory")


def row(size: int, offset: int = 0, stride: int = 1) -> Region:
    return Region(labels=("x",), offset=offset, sizes=(size,), strides=(stride,))


GRID = Region(labels=("hosts", "gpus"), offset=0, sizes=(2, 2), strides=(2, 1))


@pytest.mark.parametrize("region", OVERSIZED)
def test_an_oversized_region_is_rejected_before_its_ranks_are_listed(region: Region) -> None:
    for check in (ranks_of, check_size, lambda region: ranks_within(region, row(4), "workers")):
        with pytest.raises(RequestFailed, match=f"a mesh can have at most {MAX_RANKS} ranks"):
            check(region)


def test_the_largest_region_is_accepted_and_the_next_is_not() -> None:
    assert len(ranks_of(row(MAX_RANKS))) == MAX_RANKS
    with pytest.raises(RequestFailed):
        ranks_of(row(MAX_RANKS + 1))


def test_a_region_of_size_zero_has_no_ranks() -> None:
    assert ranks_of(row(0, stride=2**53)) == []


def test_ranks_are_in_the_row_major_order_of_the_region() -> None:
    transposed = Region(labels=("gpus", "hosts"), offset=0, sizes=(2, 2), strides=(1, 2))
    assert ranks_of(GRID) == [0, 1, 2, 3]
    assert ranks_of(transposed) == [0, 2, 1, 3]
    assert ranks_of(row(2, offset=1, stride=2)) == [1, 3]


def test_a_region_outside_the_mesh_is_rejected_with_both_named() -> None:
    part = Region(labels=("gpus",), offset=3, sizes=(2,), strides=(1,))
    expected = r"\{gpus: 2\} starting at rank 3 is not part of mesh 'workers', which has \{hosts: 2, gpus: 2\}"
    with pytest.raises(RequestFailed, match=expected):
        ranks_within(part, GRID, "workers")
    assert ranks_within(row(2, offset=2), GRID, "workers") == [2, 3]


def test_a_long_region_is_described_by_its_first_dimensions() -> None:
    many = Region(labels=tuple("abcdefghij"), offset=0, sizes=(1,) * 10, strides=(1,) * 10)
    assert describe(many) == "{a: 1, b: 1, c: 1, d: 1, e: 1, f: 1, g: 1, h: 1}"


def test_processes_are_numbered_hosts_first() -> None:
    slice_of_hosts = hosts_region(2, offset=3)
    assert procs_region(slice_of_hosts, {"gpus": 4}) == Region(
        labels=("hosts", "gpus"), offset=0, sizes=(2, 4), strides=(4, 1)
    )


@pytest.mark.parametrize("per_host", [{"gpus": 2**16, "more": 2**16}, {str(at): 1 for at in range(64)}])
def test_too_many_processes_or_dimensions_are_rejected(per_host: dict[str, int]) -> None:
    with pytest.raises(RequestFailed, match=f"at most {MAX_RANKS} ranks in 64 dimensions, and .* has more"):
        procs_region(hosts_region(2), per_host)
