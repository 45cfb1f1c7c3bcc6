"""How long kept values stay in their processes.

A kept mesh lives until the client releases it, and longer while a call is getting its values, or has references to
them and will be answered; and while processes, and messages on their way, have references to them, unless the client
releases it at once. Values of which nothing is known any more, because their call has failed on another rank, are
dropped when they come.

A process says which references it has on a connection of its own, which the kernel closes when the process ends
(``on_worker/kept_references.ProcessReferences`` is the other end of it). It also says when a reference has arrived that
it has got from another process or from the engine, so that the sender need no longer keep it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import pickle
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from itertools import count
from typing import NoReturn

from meshgate_gateway.engine.calls.kept_servers import KeptServers
from meshgate_gateway.engine.calls.pending_calls import MAX_RANKS_NAMED, Response
from meshgate_gateway.engine.failures import RequestFailed
from meshgate_gateway.engine.objects.records import KeptMesh
from meshgate_gateway.engine.objects.table import ObjectTable
from meshgate_wire.messages import Call, Failed, Failure, Header, PutValue, ReadKept, Region

ENGINE = (0, 0)  # in place of the mesh and the rank of a process that has passed a reference


class KeptMeshes:
    """The kept meshes of a session. ``holders`` are the processes and messages with references to them."""

    def __init__(self, objects: ObjectTable, servers: KeptServers) -> None:
        self._objects, self._servers = objects, servers
        self._leaving: dict[int, KeptMesh] = {}  # those that were released, and are still used
        self.holders = ReferenceHolders(self.find, self._drop_unused)

    def find(self, number: int) -> KeptMesh | None:
        """The kept mesh, unless its values were dropped."""
        found = self._objects.get(number) or self._leaving.get(number)
        return found if isinstance(found, KeptMesh) else None

    def add(self, number: int, label: str, region: Region, ranks: Sequence[int]) -> KeptMesh:
        """The mesh of a call that is about to be sent. Set its ``servers`` before it is."""
        kept = KeptMesh(number, label, None, region, tuple(ranks), asyncio.get_running_loop().create_future())
        self._objects.add(number, kept)
        return kept

    def answered(self, kept: KeptMesh, response: Response | None) -> None:
        """The call that keeps has been answered, or will not be sent."""
        if kept.done.done():
            return
        failed = None
        if response is not None and isinstance(response.header, Failed):
            failed = response.header.failure, response.buffers
        else:
            sizes = [_size(data) for data in (response.buffers if response is not None else ())]
            kept.sizes = tuple(size or 0 for size in sizes)
            if None in sizes:
                message = f"{kept.label} kept nothing: the reply was sent from another process than that of the call"
                failed = Failure(kind="invalid", message=message), ()
        if failed is not None and kept.servers is not None:  # what other ranks have kept, or will
            self._drop(kept, late=True)
        kept.done.set_result(failed)
        self._drop_unused(kept)

    async def wait(self, kept: KeptMesh) -> None:
        """Waits until the values are there. Raises RequestFailed if the call that returns them fails."""
        failed = await asyncio.shield(kept.done)
        if failed is None:
            return
        failure, buffers = failed
        if failure.kind == "supervision":
            failure = failure.model_copy(update={"kind": "lost"})
        raise RequestFailed(failure.model_copy(update={"step": failure.step or kept.label}), buffers)

    def require_alive(self, kept: KeptMesh, ranks: Collection[int]) -> None:
        """Raises RequestFailed if a process has ended that kept one of the values of these base ranks."""
        procs = kept.servers.procs
        if not procs.dead or not (lost := [rank for rank in ranks if rank in procs.dead]):
            return
        hosts = {rank: procs.host_of(rank) for rank in lost[:MAX_RANKS_NAMED]}
        raise RequestFailed(
            Failure(
                kind="lost",
                message=procs.dead[lost[0]],
                step=kept.label,
                mesh=procs.name,
                ranks=tuple(hosts),
                hosts=hosts,
                total=len(kept.ranks),
            )
        )

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

    # --- uses

    def use(self, kept: Iterable[KeptMesh]) -> None:
        """The values stay until they are ``used`` as often."""
        for each in kept:
            each.uses += 1

    def used(self, kept: Iterable[KeptMesh]) -> None:
        for each in kept:
            each.uses -= 1
            self._drop_unused(each)

    @contextlib.contextmanager
    def using(self, kept: Collection[KeptMesh]) -> Iterator[None]:
        self.use(kept)
        try:
            yield
        finally:
            self.used(kept)

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
        streams: dict[int, set[int]] = {
            number: set() for number, known in self._objects.items() if isinstance(known, KeptMesh)
        }
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
        self._servers.drop(kept.servers, kept.number, late=late)


class ReferenceHolders:
    """``find(number)`` is the kept mesh with this number, if its values have not been dropped; ``let_go(kept)`` is
    called when one has a holder less."""

    def __init__(self, find: Callable[[int], KeptMesh | None], let_go: Callable[[KeptMesh], object]) -> None:
        self.find, self._let_go = find, let_go
        self.processes: dict[tuple[int, int], ReferringProcess] = {}  # by mesh and rank
        self.casts: dict[int, Cast] = {}
        self._numbers = count(1)

    def connected(self, mesh: int, rank: int, write: Callable[[bytes], object]) -> ReferringProcess:
        """A process has got its first reference. ``write`` sends to it."""
        process = self.processes[mesh, rank] = ReferringProcess(self, (mesh, rank), write)
        return process

    def cast(self, kept: KeptMesh, target: int, receivers: int) -> Cast:
        """A message without an answer refers to ``kept``: to so many actors of the mesh ``target``."""
        cast = Cast(self, next(self._numbers), kept, target, receivers)
        self.casts[cast.number] = cast
        self.hold(kept)
        return cast

    def arrived(self, sender: tuple[int, int], number: int) -> None:
        """A copy of the reference that ``sender`` has passed as ``number`` is where it was sent."""
        if sender == ENGINE:
            if (cast := self.casts.get(number)) is not None:
                cast.arrived()
        elif (process := self.processes.get(sender)) is not None:
            process.write(b"%d\n" % number)

    def actors_ended(self, target: int) -> None:
        """All actors of the mesh have ended: nothing more arrives there."""
        for cast in [cast for cast in self.casts.values() if cast.target == target]:
            cast.end()

    def hold(self, kept: KeptMesh) -> None:
        kept.holders += 1

    def let_go(self, kept: KeptMesh) -> None:
        kept.holders -= 1
        self._let_go(kept)


class Cast:
    """A reference in a message of the engine's, until all actors have got it, or have ended. ``passed`` is what their
    processes name it by."""

    def __init__(self, holders: ReferenceHolders, number: int, kept: KeptMesh, target: int, receivers: int) -> None:
        self._holders, self.number, self._kept, self.target, self._left = holders, number, kept, target, receivers
        self.passed = (*ENGINE, number)

    def arrived(self) -> None:
        self._left -= 1
        if not self._left:
            self.end()

    def end(self) -> None:
        if self._holders.casts.pop(self.number, None) is not None:
            self._holders.let_go(self._kept)


class ReferringProcess:
    """A process that has references, or has had some."""

    def __init__(self, holders: ReferenceHolders, place: tuple[int, int], write: Callable[[bytes], object]) -> None:
        self._holders, self._place, self.write = holders, place, write
        self._kept: dict[int, KeptMesh] = {}

    def received(self, line: bytes) -> None:
        """Handles what the process says: ``+`` and the number of an object to whose values it has its first reference,
        which is answered; ``-`` and that number if its last one is gone; or ``=``, mesh and rank of a process and the
        number of a reference that has arrived from there."""
        kind, numbers = line[:1], [int(each) for each in line[1:].split()]
        if kind == b"=":
            mesh, rank, number = numbers
            self._holders.arrived((mesh, rank), number)
            return
        (number,) = numbers
        if kind == b"-":
            self._let_go(number)
            return
        kept = self._holders.find(number)
        if kept is not None and number not in self._kept:  # what has been dropped stays so: a fetch says why
            self._kept[number] = kept
            self._holders.hold(kept)
        self.write(b"+\n")

    def _let_go(self, number: int) -> None:
        if (kept := self._kept.pop(number, None)) is not None:
            self._holders.let_go(kept)

    def end(self) -> None:
        """The process has ended."""
        self._holders.processes.pop(self._place, None)
        for number in [*self._kept]:
            self._let_go(number)


def _kept_numbers(header: Header) -> Iterator[int]:
    """The kept meshes that a message names, or makes."""
    if isinstance(header, ReadKept):
        yield header.target.object
    if isinstance(header, (Call, PutValue)) and header.keep:
        yield header.keep
    yield from (each.ref.object for each in getattr(header, "arguments", ()) if each.kind == "kept")


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
