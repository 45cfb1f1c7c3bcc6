"""The actors that keep code on hosts and in processes up to date, delivered by value to bare workers.

What they need of ``meshgate_sync`` comes with their arguments as source text (``library``), because a pod may hold
nothing but torchmonarch. Imported by the engine only after Monarch's environment is set.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from monarch.actor import Actor, endpoint

from meshgate_gateway.engine.on_worker import Library, package_of

Address = tuple[str, int]


class HostCode(Actor):
    """The relay of one host, in a process of its own there."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._agent: Any = None

    @endpoint
    def start(self, names: Sequence[str], secret: bytes, owner: str, bind: str, hosts: Sequence[str]) -> Address:
        """Opens the host's store and listens; ``names`` and ``hosts`` (addresses to be told) are by rank."""
        from monarch.actor import current_rank  # noqa: PLC0415 - a name of the worker's

        rank = current_rank().rank
        agent: Any = importlib.import_module(f"{package_of(self._library)}.agent")
        self._agent = agent.HostAgent(names[rank], secret=secret, owner=owner, bind=bind, advertise=hosts[rank] or None)
        address: Address = self._agent.address
        return address

    @endpoint
    def configure(self, routes: Mapping[str, Any], addresses: Mapping[str, Address]) -> None:
        """``routes``: by host, ``(control, stripes)``."""
        plan: Any = importlib.import_module(f"{package_of(self._library)}.plan")
        control, stripes = routes[self._agent.name]
        self._agent.configure(plan.Routes(control, stripes), addresses)

    @endpoint
    def moved(self, addresses: Mapping[str, Address]) -> None:
        """Hosts that had ended are there again, at these addresses."""
        self._agent.moved(addresses)

    def __cleanup__(self, exc: Exception | None) -> None:
        if self._agent is not None:
            self._agent.stop()


class ProcessCode(Actor):
    """In each process: brings it to another version."""

    def __init__(self, library: Library) -> None:
        self._library = library

    @endpoint
    def reload(self, root: str, paths: Sequence[str]) -> dict[str, Any]:
        package = package_of(self._library)
        home: Any = importlib.import_module(f"{package}.home")
        reloading: Any = importlib.import_module(f"{package}.reload")
        with reloading.one_at_a_time:
            before = home.active_paths()
            version = home.open_version(home.default_home(), root)
            try:
                plan = reloading.plan_reload(before, version.path)
            except BaseException:
                version.close()
                raise
            earlier = list(sys.path)
            home.enter(version, paths)
            try:
                done = plan.carry_out(Actor)
            except BaseException:
                sys.path[:] = earlier
                raise
        return {"modules": done.modules, "vanished": done.vanished, "old_classes": done.old_classes}
