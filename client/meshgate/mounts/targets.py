"""Which meshes a mount is for, and what its hosts are called in paths."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any


def single_hosts(mesh: Any) -> list[tuple[Any, str]]:
    """Each host of ``mesh``, or what runs there, with what ``$SUBDIR`` stands for on it, as in Monarch: nothing if
    ``mesh`` is one host without a dimension."""
    if not mesh.sizes:
        return [(mesh, "")]
    return [(mesh.slice(hosts=slice(rank, rank + 1)), f"hosts_{rank}") for rank in range(len(mesh))]


def meshes_of(method: str, wanted: Sequence[str] | None, meshes: Collection[str]) -> list[str]:
    """``wanted``, or all of the job's ``meshes``. Raises ValueError if the job does not have one."""
    unknown = [] if wanted is None else [name for name in wanted if name not in meshes]
    if unknown:
        names = ", ".join(sorted(meshes))
        raise ValueError(f"{method}(meshes={list(wanted or ())!r}): unknown mesh {unknown[0]!r}; the job has {names}")
    return list(meshes if wanted is None else wanted)
