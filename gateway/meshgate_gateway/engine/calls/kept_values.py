"""Values that stay in their processes: what ``keep()`` and ``put()`` leave there, and how calls get it.

An actor of the engine's own in each process (``on_worker/code_actors.py``) serves the kept values of that process. It
is spawned when the mesh of the process first keeps or uses one. Before a call with kept values in its arguments is
sent, these actors of the called processes get the values from those that keep them, in Monarch's messages, which do not
pass the engine. The call then finds them in its own process. Until then it holds up its own stream only.

Actors can have references to values, and fetch these (``on_worker/kept_references.py``).

A kept mesh lives until the client releases it, and longer while a call is getting its values, or has references to
them and will be answered; and while processes have references to them (``reference_holders.py``), unless the client
releases it at once. Values of which nothing is known any more, because their call has failed on another rank, are
dropped when they come.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import pickle
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NoReturn, Protocol, TypeAlias

from meshgate_gateway.engine.calls.pending_calls import MAX_RANKS_NAMED, PendingCall, Response
from meshgate_gateway.engine.calls.reference_holders import Cast, ReferenceHolders
from meshgate_gateway.engine.failures import RequestFailed, failure_of, invalid
from meshgate_gateway.engine.interfaces import Handler
from meshgate_gateway.engine.monarch.interface import (
    Arguments,
    CallSender,
    EngineActors,
    Payloads,
    Readiness,
    Reply,
    error_text,
)
from meshgate_gateway.engine.objects.records import ActorMesh, KeptMesh, ProcMesh
from meshgate_gateway.engine.objects.regions import extent_of, rank_region, ranks_of, ranks_within
from meshgate_gateway.engine.objects.table import KeptArgument, Lookup, ObjectTable, choose
from meshgate_gateway.engine.on_worker.kept_references import MODULE
from meshgate_wire import Fragments
from meshgate_wire.messages import (
    Adopted,
    Call,
    Failed,
    Failure,
    Header,
    MeshRef,
    NameKept,
    PutValue,
    ReadKept,
    Region,
    stream_of,
)

CLASS = "KeptValuesActor"
CLASS_DATA = (f"c{MODULE}\n{CLASS}\n.".encode(),)  # a pickle that refers to it by name
NOTHING = Adopted()
OWN = 0  # in place of the number of actors: what is delivered is for the actor that serves kept values itself
Forget: TypeAlias = Callable[[Collection[int] | None], None]
"""Makes processes forget what a call has not taken: at these positions of it, or at all if it was not sent."""


class KeptMessaging(Payloads, CallSender, EngineActors, Arguments, Readiness, Protocol):
    """What kept values need of Monarch."""


class Calls(Protocol):
    """What kept values need of ``calling.Calling``."""

    def start(self, pending: PendingCall, mesh: ActorMesh, actors: Any, payload: Any, stream: int) -> None: ...

    def fail(self, mesh: ActorMesh) -> None: ...


@dataclass(slots=True, eq=False)
class Servers:
    """The actors that serve the kept values of processes, ``ranks`` of ``procs``."""

    actors: ActorMesh
    procs: ProcMesh
    ranks: frozenset[int]
    up: asyncio.Future[None]
    dropping: dict[asyncio.Future[Any], list[int]] = field(default_factory=dict)  # what processes may not have dropped
    targets: dict[int, set[int]] = field(default_factory=dict)  # of deliveries, with their actors that have ended


@dataclass(slots=True)
class Prepared:
    """What a call is sent with: the objects in its arguments, the position of the chosen rank, and what makes its
    payload that of a call that keeps, if it does. ``ended`` must be called with its answer and, if it was sent, with
    the call."""

    objects: Sequence[Any]
    chosen: int | None
    ended: Callable[[Response | None, PendingCall | None], None]
    keeping: Callable[[Any], Any] | None = None


@dataclass(slots=True, eq=False)
class _Watch:
    """Waits for the death of a process, ``ranks`` of ``procs``."""

    procs: ProcMesh
    ranks: Collection[int]
    died: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class KeptValues:
    """The kept values of a session. Set ``calls`` and ``watch`` before a message is handled.

    ``watch(number, procs)`` is called for a proc mesh that is to keep values: it may have no actors yet.
    """

    calls: Calls
    watch: Callable[[int, ProcMesh], None]

    def __init__(self, objects: ObjectTable, lookup: Lookup, monarch: KeptMessaging) -> None:
        self._objects, self._lookup, self._monarch = objects, lookup, monarch
        self._loop = asyncio.get_running_loop()
        self._servers: dict[ProcMesh, list[Servers]] = {}
        self._deliveries = count(1)
        self._watches: dict[_Watch, None] = {}
        self._leaving: dict[int, KeptMesh] = {}  # those that were released, and are still used
        self.holders = ReferenceHolders(self._find, self._drop_unused)
        self._dropped: dict[tuple[Servers, bool], list[int]] = {}  # what to drop in this turn of the event loop

    def handlers(self) -> Mapping[type, Handler]:
        return {PutValue: self._put, ReadKept: self._read, NameKept: self._name}

    # --- calls that keep, and calls that use

    async def prepare(self, header: Call, target: object, arguments: Sequence[Any]) -> Prepared | None:
        """Gets everything ready that a call needs of kept values; None: it needs nothing. Raises RequestFailed."""
        used = [argument for argument in arguments if isinstance(argument, KeptArgument)]
        if not used and not header.keep:
            return None
        mesh, _, ranks = self._lookup.actors(target, header.target)
        procs, region = _procs_of(mesh, header.endpoint), header.target.region or mesh.region
        chosen = choose(mesh, ranks) if header.adverb == "choose" else None
        forget: Forget | None = None
        label = f"{mesh.name}.{header.endpoint}.keep()"
        kept = self._add(header.keep, label, region, ranks) if header.keep else None
        # They stay until the call has ended, which the engine does not learn of a broadcast.
        referred = self._refer_to(used) if header.adverb != "broadcast" else []
        try:
            if used:
                arguments, forget = await self.deliver(
                    f"{mesh.name}.{header.endpoint}",
                    procs,
                    region,
                    arguments,
                    target=header.target.object,
                    chosen=chosen,
                    call=header.call,
                    cast=header.adverb == "broadcast",
                )
            if kept is not None:
                kept.servers = await self._served(procs, region)
        except BaseException as error:
            self._used(*referred)
            if forget is not None:
                forget(None)
            if kept is not None:
                self._failed(kept, failure_of(error), getattr(error, "buffers", ()))
            raise

        def ended(response: Response | None, sent: PendingCall | None) -> None:
            if kept is not None:
                self._answered(kept, response)
            self._used(*referred)
            if forget is not None:
                forget(_untaken(sent, mesh, response) if sent is not None else None)

        return Prepared(arguments, chosen, ended, functools.partial(self._keeping, kept) if kept is not None else None)

    async def deliver_cast(
        self, mesh: ActorMesh, endpoint: str, ref: MeshRef, arguments: Sequence[Any], chosen: int | None
    ) -> Sequence[Any]:
        """As ``deliver``, for a call of the part ``ref`` of ``mesh`` whose replies the engine does not see."""
        name, region = f"{mesh.name}.{endpoint}", ref.region or mesh.region
        procs = _procs_of(mesh, endpoint)
        objects, forget = await self.deliver(
            name, procs, region, arguments, target=ref.object, chosen=chosen, cast=True
        )
        if mesh.failed or mesh.dead:  # it takes nothing any more, and ``actors_ended`` may have been called before
            forget([at for at, rank in enumerate(ranks_of(region)) if mesh.failed or rank in mesh.dead])
            if mesh.failed or mesh.dead.keys() >= set(ranks_of(mesh.region)):
                self.holders.actors_ended(ref.object)
        return objects

    async def deliver(
        self,
        name: str,
        procs: ProcMesh,
        region: Region,
        arguments: Sequence[Any],
        *,
        target: int,
        chosen: int | None = None,
        call: int = 0,
        cast: bool = False,
    ) -> tuple[Sequence[Any], Forget]:
        """Gets kept values into the processes ``region`` of ``procs``, for the call ``name`` of the actors ``target``.
        Returns what takes their place among ``arguments``, and what makes processes forget them.

        ``chosen``: the position of the only process that needs them. ``cast``: no answer says that the actors have got
        the message, so values that it refers to stay until they have. Raises RequestFailed: with the error of the call
        that should have kept them, if it has failed, or if a process has died.
        """
        objects = list(arguments)
        kept = {index: each for index, each in enumerate(arguments) if isinstance(each, KeptArgument)}
        used = {index: each for index, each in kept.items() if not each.reference}
        referred, casts = self._refer_to(arguments), list[Cast]()
        delivery = 0
        forget: Forget = _forget_nothing
        try:
            for argument in kept.values():
                await self._wait_usable(name, procs, region, argument)
            if used:
                delivery, forget = await self._deliver(
                    name, procs, region, used, target=target, chosen=chosen, call=call
                )
            receivers = 1 if chosen is not None else extent_of(region)
            for index, argument in kept.items():
                if index in used:
                    objects[index] = self._monarch.kept_argument(delivery, index)
                    continue
                if cast:
                    casts.append(self.holders.cast(argument.kept, target, receivers))
                objects[index] = self._refer(argument, chosen, casts[-1] if cast else None)
        finally:
            self._used(*referred)
        return objects, functools.partial(_forget, forget, casts)

    async def _wait_usable(self, name: str, procs: ProcMesh, region: Region, argument: KeptArgument) -> None:
        """Waits until the values are there. Raises RequestFailed if the call ``name`` cannot have them."""
        size, kept_size = extent_of(region), extent_of(argument.region)
        if not argument.whole and kept_size not in (1, size):
            raise invalid(f"{name} runs on {size} ranks and takes kept values of {kept_size}")
        if argument.reference and not procs.number:
            raise invalid(f"{name} cannot have references, as an actor has spawned its processes: leave out .ref()")
        await self._wait_kept(argument.kept)
        self._require_alive(argument.kept, ranks_of(argument.region))

    def _refer(self, argument: KeptArgument, chosen: int | None, cast: Cast | None) -> Any:
        """References in place of the values."""
        kept, region, whole = argument.kept, argument.region, argument.region if argument.whole else None
        places = tuple(zip(kept.positions(region) or range(len(kept.ranks)), ranks_of(region), strict=True))
        at = 0 if len(places) == 1 else chosen
        passed = cast.passed if cast is not None else None
        return self._monarch.kept_reference(kept.number, kept.label, places, at, whole, passed)

    async def _deliver(
        self,
        name: str,
        procs: ProcMesh,
        region: Region,
        used: Mapping[int, KeptArgument],
        *,
        target: int,
        chosen: int | None = None,
        call: int = 0,
    ) -> tuple[int, Forget]:
        """``deliver`` of values that are there. Returns the number of the delivery."""
        ranks = ranks_of(region)
        at = region
        if chosen is not None:
            at = rank_region(ranks[chosen])
        for argument in used.values():
            argument.kept.uses += 1
        try:
            servers = await self._served(procs, at)
            servers.targets.setdefault(target, set())
            for argument in used.values():  # nothing would wake this for a process that died while it waited
                self._require_alive(argument.kept, ranks_of(argument.region))
            delivery = next(self._deliveries)
            _, actors, called = self._lookup.actors(servers.actors, MeshRef(object=0, region=at))
            payload = self._request(delivery, target, chosen, used)
            pending = PendingCall(call, "call", name.partition(".")[0], name.partition(".")[2], called, procs.host_of)
            _require_living(pending, procs)
            receiver = self._monarch.call(actors, "deliver", True, payload)

            def forget(positions: Collection[int] | None) -> None:
                forgetting = ranks_of(at) if positions is None else [ranks[position] for position in positions]
                self._cast(servers, forgetting, "forget", delivery)

            try:
                await self._collect(pending, receiver, procs, used.values())
            except Exception:
                forget(None)
                raise
        finally:
            for argument in used.values():
                argument.kept.uses -= 1
                self._drop_unused(argument.kept)
        return delivery, forget

    def _request(self, delivery: int, target: int, chosen: int | None, used: Mapping[int, KeptArgument]) -> Any:
        """The arguments of ``deliver``."""
        requests = []
        for index, argument in used.items():
            kept, region = argument.kept, argument.region
            mesh, actors, _ = self._lookup.actors(kept.servers.actors, MeshRef(object=0, region=region))
            holder = self._monarch.dump_actors(CLASS_DATA, CLASS, actors, region, mesh.procs_mesh)
            sizes, labels = region.sizes, region.labels
            positions = kept.positions(region)
            requests.append((index, kept.number, kept.label, holder, labels, sizes, positions, argument.whole))
        return self._monarch.engine_payload(delivery, target, chosen, requests)

    async def _collect(
        self, pending: PendingCall, receiver: Any, procs: ProcMesh, used: Collection[KeptArgument]
    ) -> None:
        """Waits until all processes have what they need. Raises RequestFailed if one cannot get it, or dies."""
        consumers = _Watch(procs, pending.ranks)
        holders = {_Watch(each.kept.servers.procs, ranks_of(each.region)): each.kept for each in used}
        self._watches.update(dict.fromkeys((consumers, *holders)))
        receiving: asyncio.Future[Any] | None = None
        deaths = [watch.died for watch in (consumers, *holders)]
        try:
            while True:
                receiving = self._monarch.receive(receiver)
                await asyncio.wait((receiving, *deaths), return_when=asyncio.FIRST_COMPLETED)
                for watch, kept in holders.items():
                    if watch.died.done():
                        self._require_alive(kept, watch.ranks)
                        raise invalid(f"a process that keeps a value of {kept.label} has ended")
                if consumers.died.done():
                    _require_living(pending, procs)
                    raise invalid("a process has ended")
                if not receiving.done():
                    continue
                reply: Reply = self._monarch.reply_of(receiving.result())
                response = pending.add_reply(reply, NOTHING)
                if response is None and pending.failed:
                    response = pending.finish()
                if response is not None:
                    if isinstance(response.header, Failed):
                        raise RequestFailed(response.header.failure, response.buffers)
                    return
        finally:
            if receiving is not None:
                receiving.cancel()
            for watch in (consumers, *holders):
                del self._watches[watch]

    async def fetch(self, mesh: int, rank: int, number: int, at: int) -> bytes:
        """Gets the value of object ``number`` on base rank ``at`` to process ``rank`` of the proc mesh ``mesh``, where
        an actor has a reference to it.

        Returns what ``kept_references.KeptRef.get`` expects: ``+`` and the number of the delivery, ``?`` and why the
        value is lost, ``!`` and the exception of a worker, or ``-`` and why else there is none.
        """
        kept, procs = self._find(number), self._objects.get(mesh)
        if kept is None:
            return (
                b"-it was released, with release() or while nothing but a message on its way had a reference to it. "
                b"Keep the kept mesh, or the reference, until the actor that takes it has it"
            )
        if not isinstance(procs, ProcMesh):
            return b"-this process does not belong to the session"
        try:
            used = {0: KeptArgument(kept, rank_region(at), False)}
            delivery, _ = await self._deliver("reference.get", procs, rank_region(rank), used, target=OWN)
        except RequestFailed as error:
            failure = error.failure
            if failure.kind == "actor" and error.buffers:
                return b"!" + bytes(error.buffers[0])
            lost = failure.kind == "lost"
            reason = f"the process that kept it has ended: {failure.message}" if lost else failure.message
            return (b"?" if lost else b"-") + reason.encode()
        except Exception as error:  # noqa: BLE001 - passed on to the actor that asked
            return b"-" + f"{type(error).__name__}: {error}".encode()
        return b"+%d" % delivery

    # --- kept meshes

    def _find(self, number: int) -> KeptMesh | None:
        """The kept mesh, unless its values were dropped."""
        found = self._objects.get(number) or self._leaving.get(number)
        return found if isinstance(found, KeptMesh) else None

    def _add(self, number: int, label: str, region: Region, ranks: Sequence[int]) -> KeptMesh:
        """The mesh of a call that is about to be sent. Set its ``servers`` before it is."""
        kept = KeptMesh(number, label, None, region, tuple(ranks), self._loop.create_future())
        self._objects.add(number, kept)
        return kept

    def _answered(self, kept: KeptMesh, response: Response | None) -> None:
        """The call that keeps has been answered."""
        if kept.done.done():
            return
        if response is not None and isinstance(response.header, Failed):
            self._failed(kept, response.header.failure, response.buffers)
            return
        sizes = [_size(data) for data in (response.buffers if response is not None else ())]
        kept.sizes = tuple(size or 0 for size in sizes)
        if None in sizes:
            message = f"{kept.label} kept nothing: the reply was sent from another process than that of the call"
            kept.done.set_result((Failure(kind="invalid", message=message), ()))
        else:
            kept.done.set_result(None)
        self._drop_unused(kept)

    def _failed(self, kept: KeptMesh, failure: Failure, buffers: Sequence[Any]) -> None:
        """What uses the values fails as their call, which may not have been sent."""
        kept.done.set_result((failure, buffers))
        if kept.servers is not None:
            self._drop(kept, late=True)
        self._drop_unused(kept)

    async def _wait_kept(self, kept: KeptMesh) -> None:
        """Waits until the values are there. Raises RequestFailed if the call that returns them fails."""
        failed = await asyncio.shield(kept.done)
        if failed is None:
            return
        failure, buffers = failed
        if failure.kind == "supervision":
            failure = failure.model_copy(update={"kind": "lost"})
        raise RequestFailed(failure.model_copy(update={"step": failure.step or kept.label}), buffers)

    def _require_alive(self, kept: KeptMesh, ranks: Collection[int]) -> None:
        """Raises RequestFailed if a process has ended that kept one of the values of these base ranks."""
        procs = kept.servers.procs
        if not procs.dead or not (lost := [rank for rank in ranks if rank in procs.dead]):
            return
        positions = [kept.ranks.index(rank) for rank in lost[:MAX_RANKS_NAMED]]
        hosts = {position: procs.host_of(kept.ranks[position]) for position in positions}
        raise RequestFailed(
            Failure(
                kind="lost",
                message=procs.dead[lost[0]],
                step=kept.label,
                mesh=procs.name,
                ranks=tuple(positions),
                hosts=hosts,
                total=len(kept.ranks),
            )
        )

    async def _put(self, header: PutValue, buffers: Sequence[Fragments]) -> None:
        found = await self._objects.wait(header.target.object)
        if not isinstance(found, (ProcMesh, ActorMesh)):
            raise invalid(f"object {header.target.object} is neither a proc mesh nor an actor mesh")
        procs = found if isinstance(found, ProcMesh) else _procs_of(found, "put()")
        if procs is found:
            self.watch(header.target.object, procs)
        region = header.target.region or found.region
        ranks = ranks_within(region, found.region, found.name)
        arguments: Sequence[Any] = await self._lookup.arguments(header.arguments)
        forget: Forget | None = None
        kept = self._add(header.keep, f"{found.name}.put()", region, ranks)
        referred = self._refer_to(arguments)
        try:
            if any(isinstance(argument, KeptArgument) for argument in arguments):
                name = f"{found.name}.put"
                arguments, forget = await self.deliver(name, procs, region, arguments, target=OWN, call=header.call)
            payload = self._lookup.payload(buffers, arguments)
            servers = kept.servers = await self._served(procs, region)
            pending = PendingCall(header.call, "call", found.name, "put", ranks, procs.host_of)
            _require_living(pending, procs)
        except BaseException as error:
            self._used(*referred)
            if forget is not None:
                forget(None)
            self._failed(kept, failure_of(error), getattr(error, "buffers", ()))
            raise

        def ended(response: Response | None) -> None:
            self._answered(kept, response)
            self._used(*referred)
            if forget is not None:
                forget(_untaken(pending, servers.actors, response))

        pending.on_end = ended
        self._start(pending, servers, region, self._with_room(payload, servers), header.target.object)

    async def send(self, port: Any, buffers: Sequence[Fragments], arguments: Sequence[Any]) -> None:
        """Sends a message with kept values to ``port``, from the process that keeps the first of them: they do not pass
        the engine, which does not know where the receiver is. Returns once the message has left.

        Raises RequestFailed as ``deliver``, or with what kept the message from being sent.
        """
        first = next(argument for argument in arguments if isinstance(argument, KeptArgument))
        procs = first.kept.servers.procs
        at = rank_region(ranks_of(first.region)[0])
        referred = self._refer_to(arguments)
        forget: Forget = _forget_nothing
        try:
            objects, forget = await self.deliver("port.send", procs, at, arguments, target=OWN)
            servers = await self._served(procs, at)
            _, actors, called = self._lookup.actors(servers.actors, MeshRef(object=0, region=at))
            value = self._lookup.payload(buffers, objects)
            to = self._monarch.port_argument(port)
            payload = self._monarch.engine_payload(to, value, objects=[to, value])
            pending = PendingCall(0, "call", "port", "send", called, procs.host_of)
            _require_living(pending, procs)
            await self._collect(pending, self._monarch.call(actors, "send_to", True, payload), procs, ())
        except Exception:
            forget(None)
            raise
        finally:
            self._used(*referred)

    async def _read(self, header: ReadKept, buffers: Sequence[Fragments]) -> None:
        kept = await self._objects.wait(header.target.object)
        if not isinstance(kept, KeptMesh):
            raise invalid(f"object {header.target.object} is not a kept mesh")
        region = header.target.region or kept.region
        await self._wait_kept(kept)
        ranks = ranks_within(region, kept.region, kept.label)
        self._require_alive(kept, ranks)
        procs = kept.servers.procs
        endpoint = "describe" if header.describe else "read"
        pending = PendingCall(header.call, "call", procs.name, endpoint, ranks, procs.host_of)
        kept.uses += 1
        pending.on_end = lambda _: self._used(kept)
        payload = self._monarch.engine_payload(kept.number, kept.positions(region))
        self._start(pending, kept.servers, region, payload, header.target.object)

    async def _name(self, header: NameKept, buffers: Sequence[Fragments]) -> None:
        """The ledger has noted it. Waits, so that a new holder learns what was named and never arrived."""
        with contextlib.suppress(RequestFailed):  # the calls that use the values say why there are none
            await self._objects.wait(header.kept)

    def _start(self, pending: PendingCall, servers: Servers, region: Region, payload: Any, target: int) -> None:
        _, actors, _ = self._lookup.actors(servers.actors, MeshRef(object=0, region=region))
        self.calls.start(pending, servers.actors, actors, payload, stream_of(target))

    def _refer_to(self, arguments: Iterable[Any]) -> list[KeptMesh]:
        """The kept meshes to which there are references among ``arguments``. They stay until they are ``_used``."""
        found = [each.kept for each in arguments if isinstance(each, KeptArgument) and each.reference]
        for each in found:
            each.uses += 1
        return found

    def _used(self, *kept: KeptMesh) -> None:
        for each in kept:
            each.uses -= 1
            self._drop_unused(each)

    # --- the end

    def release(self, kept: KeptMesh, *, at_once: bool = False) -> None:
        """The client no longer refers to the mesh. ``at_once``: only calls under way keep it now."""
        kept.released, kept.at_once = True, at_once
        self._leaving[kept.number] = kept
        self._drop_unused(kept)

    def holder_changed(
        self,
        waiting: Iterable[tuple[int, Header]],
        call_after: Callable[[int, Callable[[], object]], object],
        named: Container[int] = (),
    ) -> None:
        """Another client is the holder, which only knows what the earlier one has ``named``: releases each other kept
        mesh once the messages that refer to it have been handled. These are among ``waiting``, each with its stream,
        and ``call_after(stream, callback)`` calls back when those of a stream have been."""
        known = [number for number, known in self._objects.items() if isinstance(known, KeptMesh)]
        streams: dict[int, set[int]] = {number: set() for number in known}
        for stream, header in waiting:
            for number in _kept_numbers(header):
                streams.setdefault(number, set()).add(stream)
        for number, left in streams.items():
            if number in named:
                continue
            if not left:
                self._abandon(number)
            for stream in [*left]:
                call_after(stream, functools.partial(self._handled, stream, left, number))

    def _handled(self, stream: int, left: set[int], number: int) -> None:
        left.discard(stream)
        if not left:
            self._abandon(number)

    def _abandon(self, number: int) -> None:
        """Releases an object of an earlier holder, unless there is none: its call may have failed."""
        known = self._objects.get(number)
        if isinstance(known, KeptMesh):
            self._objects.release(number)
            self.release(known)

    def _drop_unused(self, kept: KeptMesh) -> None:
        if not kept.released or kept.uses or (kept.holders and not kept.at_once) or not kept.done.done():
            return
        if self._leaving.pop(kept.number, None) is not None and kept.done.result() is None:
            self._drop(kept, late=False)

    def _drop(self, kept: KeptMesh, *, late: bool) -> None:
        kept.sizes = ()
        if not self._dropped:
            self._loop.call_soon(self._send_dropped)
        self._dropped.setdefault((kept.servers, late), []).append(kept.number)

    def _send_dropped(self) -> None:
        dropped, self._dropped = self._dropped, {}
        for (servers, late), numbers in dropped.items():
            procs = servers.procs
            if procs.stopping:
                continue
            if not procs.dead:
                drop = self._monarch.call_engine_actors(
                    servers.actors.actors, len(servers.ranks), "drop", numbers, late
                )
                dropping = asyncio.ensure_future(drop)
                servers.dropping[dropping] = numbers
                dropping.add_done_callback(functools.partial(_dropped, servers))
                continue
            self._cast(servers, servers.ranks, "drop", numbers, late)

    def _cast(self, servers: Servers, ranks: Iterable[int], endpoint: str, *args: Any) -> None:
        """Sends a message to each of these processes that lives."""
        if servers.procs.stopping:
            return
        payload = self._monarch.engine_payload(*args)
        for rank in set(ranks) - servers.procs.dead.keys():
            alone = MeshRef(object=0, region=rank_region(rank))
            self._monarch.cast(self._lookup.actors(servers.actors, alone)[1], endpoint, False, payload, None)

    def actors_ended(self, mesh: ActorMesh) -> None:
        """Some actors of ``mesh`` have ended, or all of a mesh that failed: processes that live on forget what their
        calls have not taken."""
        servers = self._servers.get(mesh.procs, ()) if mesh.procs is not None else ()
        if not servers and not self.holders.casts:
            return
        region = set(ranks_of(mesh.region))
        ended = region if mesh.failed else set(mesh.dead)
        for number in [number for number, known in self._objects.items() if known is mesh]:
            if region <= ended:
                self.holders.actors_ended(number)
            for each in servers:
                if (known_ended := each.targets.get(number)) is not None:
                    self._cast(each, (ended & each.ranks) - known_ended, "forget_calls_of", [number])
                    known_ended |= ended

    def _keeping(self, kept: KeptMesh, payload: Any) -> Any:
        """``payload`` of the call whose results are ``kept``."""
        return self._monarch.payload_keeping(self._with_room(payload, kept.servers), kept.number, kept.label)

    def _with_room(self, payload: Any, servers: Servers) -> Any:
        """``payload`` of a message that keeps something. It may overtake those that drop what was released, which are
        for other actors: it drops the same before, so that there is room, and waits for none of them."""
        if self._dropped:
            self._send_dropped()
        released = [number for numbers in servers.dropping.values() for number in numbers]
        return self._monarch.payload_making_room(payload, released) if released else payload

    def process_died(self, procs: ProcMesh, rank: int, report: str) -> None:
        """Ends what waits for a process that has died or was stopped."""
        for watch in self._watches:
            if watch.procs is procs and rank in watch.ranks and not watch.died.done():
                watch.died.set_result(rank)
        for servers in self._servers.get(procs, ()):
            if rank in servers.ranks:
                servers.actors.dead[rank] = report
                for dropping in servers.dropping:
                    dropping.cancel()  # no call waits for a process that is dead
                self.calls.fail(servers.actors)

    def process_back(self, procs: ProcMesh, rank: int) -> None:
        """A process that was taken for dead has answered."""
        for servers in self._servers.get(procs, ()):
            servers.actors.dead.pop(rank, None)

    def kept_bytes(self) -> dict[int, Counter[int]]:
        """Roughly the bytes of the values that stay in processes that live: by the id of their mesh, and by rank."""
        found: dict[int, Counter[int]] = {}
        for kept in (*self._objects.values(), *self._leaving.values()):
            if isinstance(kept, KeptMesh) and kept.sizes:
                procs = kept.servers.procs
                by_rank = found.setdefault(id(procs), Counter())
                for rank, size in zip(kept.ranks, kept.sizes, strict=False):
                    if rank not in procs.dead:
                        by_rank[rank] += size
        return found

    # --- the actors that serve kept values

    async def _served(self, procs: ProcMesh, region: Region) -> Servers:
        """The actors in the processes ``region``. Raises RequestFailed if there can be none."""
        ranks = frozenset(ranks_of(region))
        known = self._servers.setdefault(procs, [])
        while True:
            servers = next((each for each in known if ranks <= each.ranks), None)
            if servers is None:
                servers = self._spawn(procs, region)
                known.append(servers)
            try:
                await asyncio.shield(servers.up)
            except Exception as error:
                if servers in known:
                    known.remove(servers)
                self._objects.require(procs.number)  # raises why the processes did not come up, if they did not
                if procs.dead.keys() & servers.ranks:
                    continue  # perhaps in a process that this call does not use: again, without it
                message = f"cannot keep values in the processes of {procs.name!r}: {error_text(error)}"
                raise RequestFailed(Failure(kind="supervision", message=message, mesh=procs.name)) from error
            return servers

    def _spawn(self, procs: ProcMesh, region: Region) -> Servers:
        """Starts the actors in all processes or, if some have ended, in ``region``, where none may have."""
        if dead := sorted(procs.dead.keys() & set(ranks_of(region))):
            raise RequestFailed(
                Failure(kind="supervision", message=procs.dead[dead[0]], mesh=procs.name, ranks=tuple(dead))
            )
        region = region if procs.dead else procs.region
        mesh = self._lookup.part(procs, region)
        per_host = extent_of(procs.region) // len(procs.host_names) if procs.host_names else 1
        spawned = self._monarch.spawn_engine_actors(mesh, "meshgate_kept", CLASS, per_host)
        actors = ActorMesh(spawned, procs.name, CLASS, (), region, procs, mesh)
        ranks = frozenset(ranks_of(region))
        watch = _Watch(procs, ranks)
        self._watches[watch] = None  # here, as a process may die before the task starts
        return Servers(actors, procs, ranks, asyncio.ensure_future(self._wait_up(actors, watch)))

    async def _wait_up(self, actors: ActorMesh, watch: _Watch) -> None:
        """Waits until the processes have their stores. Raises RequestFailed if one dies before, as it never answers."""
        answering = asyncio.ensure_future(self._wait_stores(actors))
        try:
            await asyncio.wait((answering, watch.died), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise invalid("a process has ended")
            answering.result()
        finally:
            answering.cancel()
            del self._watches[watch]

    async def _wait_stores(self, actors: ActorMesh) -> None:
        """Asks the processes: Monarch may report actors before their constructors have run."""
        actors.unique_name = await self._monarch.wait_actors_initialized(actors.actors)
        await self._monarch.call_engine_actors(actors.actors, extent_of(actors.region), "statistics")


def _forget(forget: Forget, casts: Iterable[Cast], positions: Collection[int] | None) -> None:
    """What a message with references in it has not taken."""
    forget(positions)
    if positions is None:
        for cast in casts:
            cast.end()


def _forget_nothing(positions: Collection[int] | None) -> None:
    """Of a message without values."""


def _require_living(pending: PendingCall, procs: ProcMesh) -> None:
    """Raises RequestFailed if a process that ``pending`` is for has ended."""
    response = pending.ranks_died(procs.dead)
    if response is not None:
        assert isinstance(response.header, Failed)
        raise RequestFailed(response.header.failure)


def _untaken(sent: PendingCall, mesh: ActorMesh, response: Response | None) -> Collection[int]:
    """The positions at which a call that has ended may not have taken its values: those that have raised, which may be
    before; and those that have not replied if it is unknown which actor has stopped. ``actors_ended`` is called for
    others, and actors that live take theirs."""
    stopped = response is not None and isinstance(response.header, Failed) and response.header.failure.kind != "actor"
    if not stopped or mesh.failed or mesh.dead:
        return sent.failed
    called = range(len(sent.ranks)) if sent.chosen is None else (sent.chosen,)
    return {position for position in called if position not in sent.replies} | sent.failed


def _dropped(servers: Servers, dropping: asyncio.Future[Any]) -> None:
    del servers.dropping[dropping]
    if not dropping.cancelled():
        dropping.exception()  # of a process that has ended, with all its values


def _kept_numbers(header: Header) -> Iterator[int]:
    """The kept meshes that a message names, or makes."""
    if isinstance(header, ReadKept):
        yield header.target.object
    if isinstance(header, (Call, PutValue)) and header.keep:
        yield header.keep
    yield from (each.ref.object for each in getattr(header, "arguments", ()) if each.kind == "kept")


def _procs_of(mesh: ActorMesh, what: str) -> ProcMesh:
    if mesh.procs is None:
        raise invalid(
            f"{mesh.name}.{what} cannot use kept values: its processes are not known to the session, because an "
            "endpoint returned the actors"
        )
    return mesh.procs


class _Plain(pickle.Unpickler):
    """Unpickles what the engine's own code on workers describes: numbers, texts, containers."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"a description does not contain {module_name}.{global_name}")


def _size(description: bytes | memoryview) -> int | None:
    """The bytes of a value, from the description that its process sent; None if that is something else."""
    try:
        found = _Plain(io.BytesIO(description)).load()
    except Exception:  # noqa: BLE001 - whatever a process has sent
        return None
    nbytes = found.get("nbytes") if isinstance(found, dict) else None
    return nbytes if isinstance(nbytes, int) else None
