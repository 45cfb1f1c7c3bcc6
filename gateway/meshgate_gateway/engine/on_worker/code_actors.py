"""The engine's own actors on workers, delivered by value: they keep the code on hosts and in processes up to date,
watch processes that other actors have spawned, and hand kept values from process to process.

What they need of ``meshgate_sync`` arrives in their arguments as source text, because a pod may have nothing but
torchmonarch. Importing this module imports Monarch, so the adapter does it once Monarch's environment is set.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import json
import math
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from monarch.actor import Actor, concurrent_endpoint, context, endpoint

from meshgate_gateway.engine.on_worker.kept_values import Kept, describe, frame_limit, process_store, require_frame
from meshgate_gateway.engine.on_worker.process import Sources, connect, import_sources, sync_errors
from meshgate_processes.marks import SYNC_AGENT

Address = tuple[str, int]
MESHES = 64  # of actors that serve kept values, which a process remembers
ACTORS = 1024  # in these meshes


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
        with contextlib.suppress(OSError):  # the system has no /proc
            Path("/proc/self/comm").write_text(SYNC_AGENT)  # so that a host that is to end does not wait for it
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
        reloading: Any = importlib.import_module(f"{package}.reload")
        with sync_errors(package), reloading.RELOAD_LOCK:
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
                home.leave(version)  # else the next reload would look for this process's modules there
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


class KeptValuesActor(Actor):
    """Serves the kept values of its process to other processes, and gets those that calls here need from them.

    Values travel in Monarch's own messages, from the process that keeps them to the one that uses them.
    """

    def __init__(self, processes: int) -> None:
        self._store = process_store(processes, type(self))
        self._frame_limit = frame_limit()
        # To unpickle a mesh and to slice it takes 2 to 4 ms of processor time.
        self._mesh: Any = functools.lru_cache(MESHES)(pickle.loads)
        self._actor: Any = functools.lru_cache(ACTORS)(self._actor_of)

    @endpoint
    async def put(self, number: int, label: str, value: Any) -> Any:
        return self._store.add(number, context().message_rank.rank, label, value)

    @endpoint
    async def read(self, number: int, positions: Sequence[int]) -> Any:
        """The value of the object at the position of the message. ``positions``: of those that are called, if not 0, 1
        and so on."""
        rank = context().message_rank.rank
        return self._to_send(number, positions[rank] if positions else rank)

    @endpoint
    async def describe(self, number: int, positions: Sequence[int]) -> Any:
        """As ``read``, of what the value is."""
        rank = context().message_rank.rank
        return describe(self._find(number, positions[rank] if positions else rank).value)

    @endpoint
    async def read_at(self, number: int, position: int) -> Any:
        return self._to_send(number, position)

    def _to_send(self, number: int, position: int) -> Any:
        """The value, unless it is too large for a message."""
        kept = self._find(number, position)
        require_frame(kept.value, kept.nbytes, self._frame_limit)
        return kept.value

    def _find(self, number: int, position: int) -> Kept:
        kept = self._store.find(number, position)
        if kept is None:
            raise KeyError(f"the value at position {position} of object {number} is not kept in this process")
        return kept

    @concurrent_endpoint
    async def deliver(self, delivery: int, target: int, at: int | None, requests: Sequence[Sequence[Any]]) -> None:
        """Gets the values that a call of the actors ``target`` needs here. ``at``: the position of this process in the
        call, if it is not that of the message. ``requests`` are the arguments of ``_get``, after the index of the
        argument. The engine has the delivery forgotten if this raises."""
        position = context().message_rank.rank if at is None else at
        self._store.expect(delivery, target)
        values = [self._get(position, *request) for _, *request in requests]
        gathered = await asyncio.gather(*values)
        self._store.deliver(delivery, {index: value for (index, *_), value in zip(requests, gathered, strict=True)})

    async def _get(
        self,
        position: int,
        number: int,
        label: str,
        holders: bytes,
        labels: Sequence[str],
        sizes: Sequence[int],
        positions: Sequence[int],
        whole: bool,
    ) -> Any:
        """The value of object ``number``, the result of the call ``label``, for ``position``; with ``whole``, all its
        values.

        ``holders`` are the actors in the processes that keep it, the pickle of a mesh of these ``sizes``.
        ``positions`` are as in ``read``.
        """
        from monarch.actor import ActorError, Extent, ValueMesh  # noqa: PLC0415 - resolved on the worker

        count = math.prod(sizes)

        async def at(rank: int) -> Any:
            kept_as = positions[rank] if positions else rank
            if (kept := self._store.find(number, kept_as)) is not None:
                return kept.value
            holder = self._actor(holders, tuple(labels), tuple(sizes), rank)
            try:
                return await holder.read_at.call_one(number, kept_as)
            except ActorError as error:
                error.message = f"The value of {label} on rank {kept_as} cannot be sent to another process."
                raise

        if not whole:
            return await at(position if count > 1 else 0)
        values = await asyncio.gather(*[at(rank) for rank in range(count)])
        return ValueMesh(Extent(list(labels), list(sizes)).region.as_shape(), list(values))

    def _actor_of(self, mesh: bytes, labels: Sequence[str], sizes: Sequence[int], rank: int) -> Any:
        """The actor with this rank of a pickled mesh."""
        coordinates = {}
        for label, size in reversed(list(zip(labels, sizes, strict=True))):
            rank, coordinates[label] = divmod(rank, size)
        actors = self._mesh(mesh)
        return actors.slice(**coordinates) if coordinates else actors

    @concurrent_endpoint
    async def send_to(self, port: Any, value: Any) -> None:
        """Sends a message that the driver has composed of kept values. Meanwhile this actor serves others, however long
        ``send`` waits for a slow receiver."""
        require_frame(value, describe(value)["nbytes"], self._frame_limit)
        port.return_undeliverable = False  # it would come back to this actor, as a fault that ends it
        await asyncio.to_thread(port.send, value)

    @endpoint
    async def forget(self, delivery: int) -> None:
        self._store.forget(delivery)

    @endpoint
    async def forget_calls_of(self, targets: Sequence[int]) -> None:
        self._store.forget_calls_of(targets)

    @endpoint
    async def drop(self, numbers: Sequence[int], late: bool) -> None:
        self._store.drop(numbers, late)

    @endpoint
    async def statistics(self) -> dict[str, int]:
        return self._store.statistics()
