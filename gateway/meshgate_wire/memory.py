"""The environment of processes through which arrays pass.

Their memory is new for each array, and where the kernel hands it out in pages of 4 KiB, getting them takes longer
than copying into them. glibc can ask for pages of 2 MiB (its manual: "Memory Allocation Tunables").
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["LARGE_PAGES"]

LARGE_PAGES: Mapping[str, str] = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
