"""Arithmetic of regions (hyper-rectangles of ranks), with a limit on their size. Pure.

A region's sizes can be anything that fits the wire format, so each function checks them before it allocates memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from meshgate_gateway.engine.failures import invalid
from meshgate_wire.messages import MAX_DIMENSIONS, Region

MAX_RANKS = 2**18  # per mesh


def check_size(region: Region) -> None:
    """Raises RequestFailed if the region has too many ranks, or too high ones."""
    last = region.offset + sum(max(size - 1, 0) * step for size, step in zip(region.sizes, region.strides, strict=True))
    if extent_of(region) > MAX_RANKS or last >= MAX_RANKS:
        raise invalid(f"a mesh can have at most {MAX_RANKS} ranks, but {describe(region)} was requested")


def ranks_of(region: Region) -> list[int]:
    """The base ranks of a region, in its own row-major order. Raises RequestFailed as ``check_size`` does."""
    check_size(region)
    ranks = [region.offset]
    for size, stride in zip(region.sizes, region.strides, strict=True):
        ranks = [rank + step * stride for rank in ranks for step in range(size)]
    return ranks


def ranks_within(region: Region, mesh_region: Region, mesh_name: str) -> list[int]:
    """The base ranks of ``region``. Raises RequestFailed if it is not part of the mesh's region."""
    ranks = ranks_of(region)
    if not set(ranks) <= set(ranks_of(mesh_region)):
        raise invalid(f"{describe(region)} is not part of mesh {mesh_name!r}, which has {describe(mesh_region)}")
    return ranks


def describe(region: Region) -> str:
    sizes = ", ".join(f"{label}: {size}" for label, size in zip(region.labels[:8], region.sizes, strict=False))
    return f"{{{sizes}}}" + (f" starting at rank {region.offset}" if region.offset else "")


def extent_of(region: Region) -> int:
    return math.prod(region.sizes)


def hosts_region(count: int, offset: int = 0) -> Region:
    """``count`` hosts in a row, the first one at base rank ``offset``."""
    return Region(labels=("hosts",), offset=offset, sizes=(count,), strides=(1,))


def rank_region(rank: int) -> Region:
    """The part of a mesh that is one base rank. It has no dimensions."""
    return Region(labels=(), offset=rank, sizes=(), strides=())


def procs_region(hosts: Region, per_host: Mapping[str, int]) -> Region:
    """The dense region of processes spawned on ``hosts``: Monarch numbers them from 0, hosts first.

    Raises RequestFailed if it has too many ranks or dimensions.
    """
    sizes = (*hosts.sizes, *per_host.values())
    if math.prod(sizes) > MAX_RANKS or len(sizes) > MAX_DIMENSIONS:
        raise invalid(
            f"a mesh can have at most {MAX_RANKS} ranks in {MAX_DIMENSIONS} dimensions, and {dict(per_host)} on "
            f"{describe(hosts)} has more"
        )
    strides = []
    stride = 1
    for size in reversed(sizes):
        strides.append(stride)
        stride *= size
    return Region(labels=(*hosts.labels, *per_host), offset=0, sizes=sizes, strides=tuple(reversed(strides)))
