"""Shows directories elsewhere: the laptop's on the hosts (``remote``), the hosts' on the laptop (``gather``).

Both copy, and need neither privileges nor FUSE. Code that processes run from is never sent by this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from meshgate.proxies import HostMeshProxy


class Handle(Protocol):
    """What one of Monarch's mount functions has returned."""

    @property
    def hosts(self) -> HostMeshProxy: ...

    def close(self) -> None: ...


open_handles: list[Handle] = []
"""Those that are open, of all jobs. They are here because a job that ends closes its own, and most have none."""


def forget_handle(handle: Handle) -> None:
    open_handles[:] = [each for each in open_handles if each is not handle]
