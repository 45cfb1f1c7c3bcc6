"""Which meshes a mount is for."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["host_key", "meshes_of"]


def host_key(rank: int) -> str:
    """What ``$SUBDIR`` stands for on the host ``rank``, as in Monarch."""
    return f"hosts_{rank}"


def meshes_of(method: str, wanted: Sequence[str] | None, meshes: Collection[str]) -> list[str]:
    """``wanted``, or all of the job's ``meshes``. Raises ValueError if the job does not have one."""
    unknown = [] if wanted is None else [name for name in wanted if name not in meshes]
    if unknown:
        names = ", ".join(sorted(meshes))
        raise ValueError(f"{method}(meshes={list(wanted or ())!r}): unknown mesh {unknown[0]!r}; the job has {names}")
    return list(meshes if wanted is None else wanted)
