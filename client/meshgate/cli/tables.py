"""Tables as kubectl prints them."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

__all__ = ["age_text", "meshes_text", "new_table"]


def new_table(*columns: str) -> Table:
    return Table(*columns, box=None, pad_edge=False, header_style="bold")


def meshes_text(meshes: Mapping[str, int] | None) -> str:
    """``workers=2 loaders=1``. None: the job is another version's."""
    if meshes is None:
        return "(another meshgate version)"
    return " ".join(f"{name}={count}" for name, count in meshes.items())


def age_text(seconds: float) -> str:
    """``5s``, ``12m``, ``3h``, ``2d``."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"
