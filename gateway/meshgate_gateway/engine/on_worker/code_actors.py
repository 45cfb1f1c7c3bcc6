"""The engine's own actors on workers, delivered by value: they keep the code on hosts and in processes up to date, and
watch processes that other actors have spawned.

What they need of ``meshgate_sync`` arrives in their arguments as source text, because a pod may have nothing but
torchmonarch. Importing this module imports Monarch, so the adapter does it once Monarch's environment is set.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from monarch.actor import Actor, endpoint

from meshgate_gateway.engine.on_worker.process import Sources, connect, import_sources

Address = tuple[str, int]


class HostAgentActor(Actor):
    """Runs the sync agent of one host, in a process of its own there."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._agent: Any = None

    @endpoint
    def start(
        self, names: Sequence[str], secret: bytes, owner: str, bind: str, advertised: Sequence[str]
    ) -> Address | str:
        """Opens the host's store and listens. ``names`` and ``advertised``, the IP addresses, are by rank. Returns why
        that is not possible: the engine does not have the classes of the errors."""
        from monarch.actor import current_rank  # noqa: PLC0415 - resolved on the worker

        rank = current_rank().rank
        package = import_sources(self._sources)
        agent: Any = importlib.import_module(f"{package}.distribution.agent")
        errors: Any = importlib.import_module(f"{package}.errors")
        try:
            self._agent = agent.HostAgent(
                names[rank], secret=secret, owner=owner, bind=bind, advertise=advertised[rank] or None
            )
        except (errors.SyncError, OSError) as error:
            return str(error)
        address: Address = self._agent.address
        return address

    @endpoint
    def configure(self, routes: Mapping[str, Any], addresses: Mapping[str, Address]) -> None:
        """``routes`` are ``(control, stripes)`` by host."""
        plan: Any = importlib.import_module(f"{import_sources(self._sources)}.relay.plan")
        control, stripes = routes[self._agent.name]
        self._agent.configure(plan.Routes(control, stripes), addresses)

    @endpoint
    def moved(self, addresses: Mapping[str, Address]) -> None:
        """Agents that were restarted listen at these addresses."""
        self._agent.restarted(addresses)

    def __cleanup__(self, exc: Exception | None) -> None:
        if self._agent is not None:
            self._agent.stop()


class ProcessReloader(Actor):
    """Reloads one process: brings it to another version of the code."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    @endpoint
    def reload(self, root: str, paths: Sequence[str]) -> dict[str, Any]:
        package = import_sources(self._sources)
        home: Any = importlib.import_module(f"{package}.store.home")
        reloading: Any = importlib.import_module(f"{package}.reload.reload")
        with reloading.RELOAD_LOCK:
            before = home.active_paths()
            version = home.open_version(home.default_home(), root)
            try:
                plan = reloading.plan_reload(before, version.path, paths)
            except BaseException:
                version.close()
                raise
            earlier = list(sys.path)
            home.enter(version, paths)
            try:
                done = plan.execute(Actor)
            except BaseException:
                sys.path[:] = earlier
                raise
        return {"modules": done.modules, "vanished": done.vanished, "old_classes": done.old_classes}


class ProcessWatcher(Actor):
    """Connects its process to the engine. The kernel closes the connection when the process ends."""

    def __init__(self, address: str, secret: str, mesh: int) -> None:
        from monarch.actor import current_rank  # noqa: PLC0415 - resolved on the worker

        hello = {"secret": secret, "mesh": mesh, "rank": current_rank().rank, "pid": os.getpid(), "stream": "watch"}
        connection = connect(address)
        connection.sendall(json.dumps(hello).encode() + b"\n")
        connection.detach()  # stays open until the process ends, even if Monarch drops this actor
