"""Calls that keep values in their processes, with ``keep()`` and ``put()``, and calls that use these.

Before a call with kept values in its arguments is sent, the actors that serve the values of the called processes
(``kept_servers.py``) get them from those that keep them, in Monarch's messages, which do not pass the engine. The call
then finds them in its own process. Until then it holds up its own stream only. ``kept_meshes.py`` decides how long
values stay.

Actors can have references to values, and fetch these (``on_worker/kept_references.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

from meshgate_gateway.engine.calls.kept_meshes import Cast, KeptMeshes
from meshgate_gateway.engine.calls.kept_servers import KeptMessaging, KeptServers, Servers, require_living
from meshgate_gateway.engine.calls.pending_calls import PendingCall, Response
from meshgate_gateway.engine.failures import RequestFailed, failure_of, invalid
from meshgate_gateway.engine.interfaces import Handler
from meshgate_gateway.engine.objects.records import ActorMesh, KeptMesh, ProcMesh
from meshgate_gateway.engine.objects.regions import extent_of, rank_region, ranks_of, ranks_within
from meshgate_gateway.engine.objects.table import KeptArgument, Lookup, ObjectTable, Taker, choose
from meshgate_wire import Fragments
from meshgate_wire.messages import Adopted, Call, Failed, MeshRef, NameKept, PutValue, ReadKept, Region

NOTHING = Adopted()
OWN = 0  # in place of the number of actors: what is delivered is for the actor that serves kept values itself
Forget: TypeAlias = Callable[[Collection[int] | None], None]
"""Makes processes forget what a call has not taken: at these positions of it, or at all if it was not sent."""


@dataclass(slots=True)
class Prepared:
    """What a call is sent with: the objects in its arguments, the position of the chosen rank, and what makes its
    payload that of a call that keeps, if it does. ``ended`` must be called with its answer and, if it was sent, with
    the call."""

    objects: Sequence[Any]
    chosen: int | None
    ended: Callable[[Response | None, PendingCall | None], None]
    keeping: Callable[[Any], Any] | None = None


class KeptValues:
    """The kept values of a session. Set ``servers.calls`` and ``watch`` before a message is handled.

    ``watch(number, procs)`` is called for a proc mesh that is to keep values: it may have no actors yet.
    """

    watch: Callable[[int, ProcMesh], None]

    def __init__(self, objects: ObjectTable, lookup: Lookup, monarch: KeptMessaging) -> None:
        self._objects, self._lookup, self._monarch = objects, lookup, monarch
        self.servers = KeptServers(objects, lookup, monarch)
        self.meshes = KeptMeshes(objects, self.servers)
        self._deliveries = count(1)

    def handlers(self) -> Mapping[type, Handler]:
        return {PutValue: self._put, ReadKept: self._read, NameKept: self._name}

    # --- calls that keep, and calls that use

    async def prepare(self, header: Call, target: object, arguments: Sequence[Any]) -> Prepared | None:
        """Gets everything ready that a call needs of kept values; None: it needs nothing. Raises RequestFailed."""
        if not header.keep and not any(isinstance(argument, KeptArgument) for argument in arguments):
            return None
        mesh, _, ranks = self._lookup.actors(target, header.target)
        procs, region = _procs_of(mesh, header.endpoint), header.target.region or mesh.region
        name, chosen = f"{mesh.name}.{header.endpoint}", choose(mesh, ranks) if header.adverb == "choose" else None
        kept = self.meshes.add(header.keep, f"{name}.keep()", region, ranks) if header.keep else None
        taker = Taker(name, procs, region, header.target.object, chosen, header.call, header.adverb == "broadcast")
        prepared = await self._prepare(taker, lambda: mesh, arguments, kept)
        if kept is not None:
            prepared.keeping = lambda payload: self._monarch.payload_keeping(
                self.servers.with_room(payload, kept.servers), kept.number, kept.label
            )
        return prepared

    async def _prepare(
        self, taker: Taker, actors: Callable[[], ActorMesh], arguments: Sequence[Any], kept: KeptMesh | None
    ) -> Prepared:
        """Gets ready for a call of ``actors()``, whose results are to be ``kept``."""
        # They stay until the call has ended, which the engine does not learn of a broadcast.
        referred = [] if taker.cast else _referred(arguments)
        self.meshes.use(referred)
        forget: Forget = _forget_nothing

        def ended(response: Response | None, sent: PendingCall | None) -> None:
            if kept is not None:
                self.meshes.answered(kept, response)
            self.meshes.used(referred)
            forget(_untaken(sent, actors(), response) if sent is not None else None)

        try:
            objects, forget = await self.deliver(taker, arguments)
            if kept is not None:
                kept.servers = await self.servers.get(taker.procs, taker.region)
        except BaseException as error:
            ended(_failure(taker.call, error), None)
            raise
        return Prepared(objects, taker.chosen, ended)

    async def deliver_cast(
        self, mesh: ActorMesh, endpoint: str, ref: MeshRef, arguments: Sequence[Any], chosen: int | None
    ) -> Sequence[Any]:
        """As ``deliver``, for a call of the part ``ref`` of ``mesh`` whose replies the engine does not see."""
        region, procs = ref.region or mesh.region, _procs_of(mesh, endpoint)
        taker = Taker(f"{mesh.name}.{endpoint}", procs, region, ref.object, chosen, cast=True)
        objects, forget = await self.deliver(taker, arguments)
        if mesh.failed or mesh.dead:  # it takes nothing any more, and ``actors_ended`` may have been called before
            forget([at for at, rank in enumerate(ranks_of(region)) if mesh.failed or rank in mesh.dead])
            if mesh.failed or mesh.dead.keys() >= set(ranks_of(mesh.region)):
                self.meshes.holders.actors_ended(ref.object)
        return objects

    async def deliver(self, taker: Taker, arguments: Sequence[Any]) -> tuple[Sequence[Any], Forget]:
        """Gets kept values into the processes of ``taker``. Returns what takes their place among ``arguments``, and
        what makes processes forget them. Values that a cast refers to stay until its actors have got it.

        Raises RequestFailed: with the error of the call that should have kept them, if it has failed, or if a process
        has died.
        """
        objects = list(arguments)
        kept = {index: each for index, each in enumerate(arguments) if isinstance(each, KeptArgument)}
        used = {index: each for index, each in kept.items() if not each.reference}
        casts: list[Cast] = []
        delivery = 0
        forget_values: Forget = _forget_nothing
        with self.meshes.using([argument.kept for argument in kept.values()]):
            for argument in kept.values():
                await self._wait_usable(taker, argument)
            if used:
                delivery, forget_values = await self._deliver(taker, used)
            for index, argument in kept.items():
                if argument.reference:
                    objects[index] = self._refer(taker, argument, casts)
                else:
                    objects[index] = self._monarch.kept_argument(delivery, index)

        def forget(positions: Collection[int] | None) -> None:
            forget_values(positions)
            for each in casts if positions is None else ():
                each.end()

        return objects, forget

    async def _wait_usable(self, taker: Taker, argument: KeptArgument) -> None:
        """Waits until the values are there. Raises RequestFailed if the taker cannot have them."""
        size, kept_size = extent_of(taker.region), extent_of(argument.region)
        if not argument.whole and kept_size not in (1, size):
            raise invalid(f"{taker.name} runs on {size} ranks and takes kept values of {kept_size}")
        if argument.reference and not taker.procs.number:
            raise invalid(
                f"{taker.name} cannot have references, as an actor has spawned its processes: leave out .ref()"
            )
        await self.meshes.wait(argument.kept)
        self.meshes.require_alive(argument.kept, ranks_of(argument.region))

    def _refer(self, taker: Taker, argument: KeptArgument, casts: list[Cast]) -> Any:
        """References in place of the values. Adds to ``casts`` if the taker is one."""
        kept, region, whole = argument.kept, argument.region, argument.region if argument.whole else None
        places = tuple(zip(kept.positions(region) or range(len(kept.ranks)), ranks_of(region), strict=True))
        at, passed = 0 if len(places) == 1 else taker.chosen, None
        if taker.cast:
            receivers = 1 if taker.chosen is not None else extent_of(taker.region)
            casts.append(self.meshes.holders.cast(kept, taker.target, receivers))
            passed = casts[-1].passed
        return self._monarch.kept_reference(kept.number, kept.label, places, at, whole, passed)

    async def _deliver(self, taker: Taker, used: Mapping[int, KeptArgument]) -> tuple[int, Forget]:
        """``deliver`` of values that are there. Returns the number of the delivery."""
        ranks = ranks_of(taker.region)
        at = taker.region if taker.chosen is None else rank_region(ranks[taker.chosen])
        servers = await self.servers.get(taker.procs, at)
        servers.targets.setdefault(taker.target, set())
        for argument in used.values():  # a process may have died while this waited
            self.meshes.require_alive(argument.kept, ranks_of(argument.region))
        delivery = next(self._deliveries)
        requests = []
        for index, argument in used.items():
            kept, region = argument.kept, argument.region
            holder, positions = self.servers.dump(kept.servers, region), kept.positions(region)
            requests.append(
                (index, kept.number, kept.label, holder, region.labels, region.sizes, positions, argument.whole)
            )
        payload = self._monarch.engine_payload(delivery, taker.target, taker.chosen, requests)

        def forget(positions: Collection[int] | None) -> None:
            forgetting = ranks_of(at) if positions is None else [ranks[position] for position in positions]
            self.servers.cast(servers, forgetting, "forget", delivery)

        try:
            await self._ask(servers, at, "deliver", payload, taker.name, taker.call, used.values())
        except Exception:
            forget(None)
            raise
        return delivery, forget

    async def _ask(
        self,
        servers: Servers,
        at: Region,
        endpoint: str,
        payload: Any,
        name: str,
        call: int = 0,
        used: Collection[KeptArgument] = (),
    ) -> None:
        """Waits until the processes ``at`` have done what the call ``name`` needs, with the values ``used`` of others.
        Raises RequestFailed if one cannot, or dies."""
        procs = servers.procs
        actors, called = self.servers.part(servers, at)
        mesh, _, method = name.partition(".")
        pending = PendingCall(call, "call", mesh, method, called, procs.host_of)
        require_living(pending, procs)
        receiver = self._monarch.call(actors, endpoint, True, payload)
        keeping = [(each.kept.servers.procs, ranks_of(each.region)) for each in used]
        with self.servers.watching((procs, called), *keeping) as died:
            response: Response | None = None
            while response is None:
                receiving = self._monarch.receive(receiver)
                try:
                    await asyncio.wait((receiving, died), return_when=asyncio.FIRST_COMPLETED)
                    if died.done():
                        for each in used:
                            self.meshes.require_alive(each.kept, ranks_of(each.region))
                        require_living(pending, procs)
                        raise invalid("a process has ended")
                    response = pending.add_reply(self._monarch.reply_of(receiving.result()), NOTHING)
                finally:
                    if receiving.cancel():
                        self._monarch.close(receiver)
                if response is None and pending.failed:
                    response = pending.finish()
        if isinstance(response.header, Failed):
            raise RequestFailed(response.header.failure, response.buffers)

    async def fetch(self, mesh: int, rank: int, number: int, at: int) -> bytes:
        """Gets the value of object ``number`` on base rank ``at`` to process ``rank`` of the proc mesh ``mesh``, where
        an actor has a reference to it.

        Returns what ``kept_references.KeptRef.get`` expects: ``+`` and the number of the delivery, ``?`` and why the
        value is lost, ``!`` and the exception of a worker, or ``-`` and why else there is none.
        """
        kept, procs = self.meshes.find(number), self._objects.get(mesh)
        if kept is None:
            return (
                b"-it was released, with release() or while nothing but a message on its way had a reference to it. "
                b"Keep the kept mesh, or the reference, until the actor that takes it has it"
            )
        if not isinstance(procs, ProcMesh):
            return b"-this process does not belong to the session"
        taker = Taker("reference.get", procs, rank_region(rank), OWN)
        try:
            with self.meshes.using([kept]):
                delivery, _ = await self._deliver(taker, {0: KeptArgument(kept, rank_region(at), False)})
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

    async def send(self, port: Any, buffers: Sequence[Fragments], arguments: Sequence[Any]) -> None:
        """Sends a message with kept values to ``port``, from the process that keeps the first of them: they do not pass
        the engine, which does not know where the receiver is. Returns once the message has left.

        Raises RequestFailed as ``deliver``, or with what kept the message from being sent.
        """
        first = next(argument for argument in arguments if isinstance(argument, KeptArgument))
        at = rank_region(ranks_of(first.region)[0])
        forget: Forget = _forget_nothing
        with self.meshes.using([first.kept, *_referred(arguments)]):
            try:
                await self.meshes.wait(first.kept)  # before, it is not known which process this is
                procs = first.kept.servers.procs
                objects, forget = await self.deliver(Taker("port.send", procs, at, OWN), arguments)
                servers = await self.servers.get(procs, at)
                value = self._lookup.payload(buffers, objects)
                to = self._monarch.port_argument(port)
                payload = self._monarch.engine_payload(to, value, objects=[to, value])
                await self._ask(servers, at, "send_to", payload, "port.send")
            except Exception:
                forget(None)
                raise

    def actors_ended(self, mesh: ActorMesh) -> None:
        """Some actors of ``mesh`` have ended, or all of a mesh that failed: processes that live on forget what their
        calls have not taken."""
        if not self.meshes.holders.casts and not self.servers.has(mesh.procs):
            return  # large meshes whose actors end one by one; most sessions keep nothing
        region = set(ranks_of(mesh.region))
        ended = region if mesh.failed else set(mesh.dead)
        for number in [number for number, known in self._objects.items() if known is mesh]:
            if region <= ended:
                self.meshes.holders.actors_ended(number)
            self.servers.actors_ended(mesh.procs, number, ended)

    # --- the client's requests

    async def _put(self, header: PutValue, buffers: Sequence[Fragments]) -> None:
        found = await self._objects.wait(header.target.object)
        if not isinstance(found, (ProcMesh, ActorMesh)):
            raise invalid(f"object {header.target.object} is neither a proc mesh nor an actor mesh")
        procs = found if isinstance(found, ProcMesh) else _procs_of(found, "put()")
        if procs is found:
            self.watch(header.target.object, procs)
        region = header.target.region or found.region
        ranks = ranks_within(region, found.region, found.name)
        arguments = await self._lookup.arguments(header.arguments)
        kept = self.meshes.add(header.keep, f"{found.name}.put()", region, ranks)
        taker = Taker(f"{found.name}.put", procs, region, OWN, call=header.call)
        prepared = await self._prepare(taker, lambda: kept.servers.actors, arguments, kept)
        try:
            payload = self._lookup.payload(buffers, prepared.objects)
            pending = PendingCall(header.call, "call", found.name, "put", ranks, procs.host_of)
            require_living(pending, procs)
        except BaseException as error:
            prepared.ended(_failure(header.call, error), None)
            raise
        pending.on_end = lambda response: prepared.ended(response, pending)
        payload = self.servers.with_room(payload, kept.servers)
        self.servers.start(pending, kept.servers, region, payload, header.target.object)

    async def _read(self, header: ReadKept, buffers: Sequence[Fragments]) -> None:
        kept = await self._objects.wait(header.target.object)
        if not isinstance(kept, KeptMesh):
            raise invalid(f"object {header.target.object} is not a kept mesh")
        region = header.target.region or kept.region
        await self.meshes.wait(kept)
        ranks = ranks_within(region, kept.region, kept.label)
        self.meshes.require_alive(kept, ranks)
        procs = kept.servers.procs
        endpoint = "describe" if header.describe else "read"
        pending = PendingCall(header.call, "call", procs.name, endpoint, ranks, procs.host_of)
        self.meshes.use([kept])
        pending.on_end = lambda _: self.meshes.used([kept])
        payload = self._monarch.engine_payload(kept.number, kept.positions(region))
        self.servers.start(pending, kept.servers, region, payload, header.target.object)

    async def _name(self, header: NameKept, buffers: Sequence[Fragments]) -> None:
        """The ledger has noted it. Waits, so that a new holder learns what was named and never arrived."""
        with contextlib.suppress(RequestFailed):  # the calls that use the values say why there are none
            await self._objects.wait(header.kept)


def _referred(arguments: Sequence[Any]) -> list[KeptMesh]:
    """The kept meshes to which there are references among ``arguments``."""
    return [each.kept for each in arguments if isinstance(each, KeptArgument) and each.reference]


def _failure(call: int, error: BaseException) -> Response:
    """The answer to a call that is not sent."""
    return Response(Failed(call=call, failure=failure_of(error)), tuple(getattr(error, "buffers", ())))


def _forget_nothing(positions: Collection[int] | None) -> None:
    """Of a message without values."""


def _untaken(sent: PendingCall, mesh: ActorMesh, response: Response | None) -> Collection[int]:
    """The positions at which a call that has ended may not have taken its values: those that have raised, which may be
    before; and those that have not replied if it is unknown which actor has stopped. ``actors_ended`` is called for
    others, and actors that live take theirs."""
    stopped = response is not None and isinstance(response.header, Failed) and response.header.failure.kind != "actor"
    if not stopped or mesh.failed or mesh.dead:
        return sent.failed
    called = range(len(sent.ranks)) if sent.chosen is None else (sent.chosen,)
    return {position for position in called if position not in sent.replies} | sent.failed


def _procs_of(mesh: ActorMesh, what: str) -> ProcMesh:
    if mesh.procs is None:
        raise invalid(
            f"{mesh.name}.{what} cannot use kept values: its processes are not known to the session, because an "
            "endpoint returned the actors"
        )
    return mesh.procs
