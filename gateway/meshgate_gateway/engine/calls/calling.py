"""Sends calls to actors and their responses to the client; ``PendingCall`` decides what to respond.

If its actors exist, a call is sent to them in the callback that received it: no task, no queue.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from meshgate_gateway.engine.calls.batches import OPEN_CALLS, BatchedCall, Batches
from meshgate_gateway.engine.calls.kept_values import KeptValues, Prepared
from meshgate_gateway.engine.calls.pending_calls import (
    GATHER_FAILURES,
    CallEvent,
    CallState,
    PendingCall,
    Response,
)
from meshgate_gateway.engine.engine_metrics import EngineMetrics
from meshgate_gateway.engine.failures import RequestFailed, failure_of, invalid
from meshgate_gateway.engine.interfaces import Send
from meshgate_gateway.engine.memory import SMALL, ValueMemory
from meshgate_gateway.engine.monarch.interface import CallSender, Payloads, Reply, reports_a_stop, silent_position
from meshgate_gateway.engine.monarch.settings import FrameTooLarge
from meshgate_gateway.engine.objects.records import ActorMesh, Timeline
from meshgate_gateway.engine.objects.regions import ranks_of
from meshgate_gateway.engine.objects.table import Lookup, ObjectTable, choose
from meshgate_wire import Fragments, MessageTooLarge
from meshgate_wire.messages import Adopted, Call, CancelCall, Failed, Failure, Fault, Progress, stream_of, waiting_ranks
from meshgate_wire.status import CallStatus

_NO_MESHES = Adopted()
REPORT_INTERVAL = 0.25  # seconds; a call that takes longer is reported when its progress has changed
MAX_REPORTED = 256  # the oldest calls
CALLS_PER_REPORT = 32
CANCEL_PATIENCE = 2.0  # seconds; then a line names the ranks that still run a call that was cancelled
MAX_SUPERVISED = 1024  # parts of meshes whose next fault Monarch is to report; above it, idle ones are dropped


class Messaging(Payloads, CallSender, Protocol):
    """What calls need of Monarch."""


class Calling:
    """The calls of a session. ``idle`` is called when the last pending call has been answered.

    ``unread_output(procs, ranks)`` is what to wait for so that what these processes have printed is sent to the client
    before their replies; None: it has been sent. ``printed(procs, rank, positions)`` gets a reply's ``printed``.
    ``cancel_on(procs, ranks, call)`` lets these processes know that the call is cancelled; ``notice(text)`` shows the
    user a line.
    """

    def __init__(
        self,
        objects: ObjectTable,
        lookup: Lookup,
        monarch: Messaging,
        send: Send,
        *,
        idle: Callable[[], None],
        metrics: EngineMetrics,
        memory: ValueMemory,
        kept: KeptValues,
        unread_output: Callable[[int, Sequence[int]], asyncio.Future[None] | None] = lambda procs, ranks: None,
        printed: Callable[[int, int, tuple[int, int]], None] = lambda procs, rank, positions: None,
        cancel_on: Callable[[int, Collection[int], int], None] = lambda procs, ranks, call: None,
        notice: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._objects, self._lookup, self._monarch, self._send, self._idle = objects, lookup, monarch, send, idle
        self._metrics, self._unread_output, self._memory = metrics, unread_output, memory
        self._printed, self._kept, self._cancel_on, self._notice = printed, kept, cancel_on, notice
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, tuple[PendingCall, ActorMesh, int]] = {}
        self._receiving: dict[int, tuple[asyncio.Future[Any], Any]] = {}  # next messages of calls, and their receivers
        self._supervised: dict[Any, asyncio.Future[Any]] = {}  # the next fault of a part of a mesh
        self.cancelled: set[int] = set()  # calls that were answered so before they were sent to actors
        self._report_timer: asyncio.TimerHandle | None = None
        self._batches = Batches(monarch, self._replied_in_batch, self._failed_in_batch)

    def call(self, header: Call, buffers: Sequence[Fragments]) -> Awaitable[None] | None:
        if self.cancelled and self._was_cancelled(header):
            return None
        target = self._objects.require(header.target.object)
        if target is None or header.arguments or header.keep:
            return self._call_later(header, buffers)
        self._dispatch(header, buffers, target, ())
        return None

    async def _call_later(self, header: Call, buffers: Sequence[Fragments]) -> None:
        try:
            target = await self._objects.wait(header.target.object)
            arguments = await self._lookup.arguments(header.arguments)
            prepared = await self._kept.prepare(header, target, arguments)
        except BaseException as error:
            if self._was_cancelled(header):
                return
            if header.adverb == "broadcast" and isinstance(error, RequestFailed):  # nothing waits for an answer
                self._notice(f"a broadcast of {header.endpoint} was not sent: {error}")
            raise
        if self._was_cancelled(header):
            if prepared is not None:
                prepared.ended(_cancelled(header), None)
            return
        if prepared is None:
            self._dispatch(header, buffers, target, arguments)
            return
        try:
            self._dispatch(header, buffers, target, prepared.objects, prepared)
        except BaseException as error:
            prepared.ended(Response(Failed(call=header.call, failure=failure_of(error))), None)
            raise

    def _was_cancelled(self, header: Call) -> bool:
        """Whether the call, whose turn it is, has its answer already."""
        cancelled = header.call in self.cancelled
        self.cancelled.discard(header.call)
        return cancelled

    def cancel(self, header: CancelCall, waiting: Iterable[Call]) -> None:
        """Answers the call, and has its ranks freed. ``waiting``: the calls that were not sent to actors yet.

        A call that keeps its results is not cancelled: later ones may wait for them.
        """
        number = header.cancelled
        if number in self.cancelled:
            return
        if number not in self._pending:
            call = next((each for each in waiting if each.call == number), None)
            if call is not None and not call.keep and call.adverb != "broadcast":
                self.cancelled.add(number)
                self._respond(_cancelled(call), stream_of(call.target.object))
            return
        pending, mesh, stream = self._pending[number]
        if pending.header is None or pending.header.keep or (response := pending.cancel()) is None:
            return
        self._respond(response, stream)
        if mesh.procs is not None and mesh.procs.number:
            called = range(len(pending.ranks)) if pending.chosen is None else (pending.chosen,)
            ranks = {pending.ranks[at] for at in called if at not in pending.replies}
            self._cancel_on(mesh.procs.number, ranks, number)
        self._loop.call_later(CANCEL_PATIENCE, self._report_cancelled, pending, mesh)

    def _report_cancelled(self, pending: PendingCall, mesh: ActorMesh) -> None:
        """Shows which ranks still run a call that was cancelled a while ago, once they are up and have no call before
        it."""
        if pending.state is not CallState.CANCELLED:
            return
        starting = mesh.up is not None and not mesh.up.done()
        if starting or next(first for first, target, _ in self._pending.values() if target is mesh) is not pending:
            self._loop.call_later(CANCEL_PATIENCE, self._report_cancelled, pending, mesh)
            return
        waiting = waiting_ranks(pending.waiting(), pending.expected - len(pending.replies))
        where = waiting if pending.chosen is None else "the chosen rank"
        self._notice(
            f"{pending.mesh}.{pending.endpoint} was cancelled, but has not ended on "
            f"{where}: only an async endpoint can be interrupted, where it awaits. Its result is "
            "dropped. To end it, stop() the processes"
        )

    def is_running(self, number: int) -> bool:
        """Whether the call waits for replies of actors."""
        return number in self._pending and self._pending[number][0].state is not CallState.CANCELLED

    def open_calls(self) -> list[Call]:
        """The calls that were sent and are not answered yet."""
        return [
            pending.header
            for pending, *_ in self._pending.values()
            if pending.header is not None and pending.state is not CallState.CANCELLED
        ]

    def streamed(self, number: int) -> tuple[int, ...]:
        """The positions of the replies that a stream has given so far; none of another call."""
        pending = self._pending[number][0] if number in self._pending else None
        return tuple(pending.replies) if pending is not None and pending.adverb == "stream" else ()

    def _dispatch(
        self,
        header: Call,
        buffers: Sequence[Fragments],
        target: object,
        objects: Sequence[Any],
        prepared: Prepared | None = None,
    ) -> None:
        mesh, actors, ranks = self._lookup.actors(target, header.target)
        chosen = prepared.chosen if prepared is not None else None
        if chosen is None and header.adverb == "choose":
            chosen = choose(mesh, ranks)
        pending = PendingCall(
            header.call, header.adverb, mesh.name, header.endpoint, ranks, mesh.host_of, chosen, header
        )
        number = header.target.object
        stream = number if number >= 0 else stream_of(number)
        totals = pending.totals = mesh.totals.get(header.endpoint) or mesh.totals_of(header.endpoint)
        response = None
        if mesh.failed or mesh.dead:
            response = pending.fail(mesh.failed) if mesh.failed else pending.ranks_died(mesh.dead)
        if response is not None:
            self._metrics.call_ended(0.0, failed=True)
            totals.ended += 1
            totals.failed += 1
            if prepared is not None:
                prepared.ended(response, None)
            if header.adverb != "broadcast":
                self._respond(response, stream)
            return
        payload = self._lookup.payload(buffers, objects)
        if prepared is not None:
            pending.on_end = functools.partial(_ended, prepared, pending)
            if prepared.keeping is not None:
                payload = prepared.keeping(payload)
        if chosen is not None:
            actors, payload = self._lookup.one_actor(mesh, header.target, ranks[chosen], chosen, payload)
        if header.trace:
            payload = self._monarch.payload_with_trace(payload, header.trace)
        try:
            if header.adverb == "broadcast":
                self.flush()
                self._monarch.cast(actors, header.endpoint, header.explicit_port, payload, None)
                self._metrics.cast()
                totals.casts += 1
            else:
                self.start(pending, mesh, actors, payload, stream, header.explicit_port)
        except FrameTooLarge as error:
            self._send(Fault(object=None, mesh=mesh.name, ranks=(), report=str(error)))  # Monarch reports both
            raise

    def start(
        self,
        pending: PendingCall,
        mesh: ActorMesh,
        actors: Any,
        payload: Any,
        stream: int,
        explicit_port: bool = False,
    ) -> None:
        """Sends a call to ``actors``, a part of ``mesh``. Responses go to the client on ``stream``.

        Raises RequestFailed if a call of this number is open.
        """
        if pending.call in self._pending:
            raise invalid(f"call {pending.call} is open: another call needs another number")
        pending.part = actors
        procs, number = mesh.procs, 0
        if pending.header is not None and procs is not None and procs.number and not mesh.returned:
            number = pending.call  # by which the processes know it: the engine has set them up
        supervised = actors in self._supervised
        if len(self._pending) >= OPEN_CALLS or self._batches.open:
            if supervised and number and self._batches.add(pending, mesh, stream, payload):
                self._pending[pending.call] = (pending, mesh, stream)
                return
            self._batches.flush()
        several = pending.expected > 1 and not explicit_port
        call = (actors, pending.endpoint, explicit_port, payload, number)
        if supervised:
            receiver = self._monarch.call(*call, several=several)
        else:
            receiver, fault = self._monarch.call_supervised(*call, several=several)
            fault.add_done_callback(functools.partial(self._part_failed, mesh, actors))
            self._supervised[actors] = fault
            self._drop_idle_parts()
        self._pending[pending.call] = (pending, mesh, stream)
        if self._report_timer is None:
            self._report_timer = self._loop.call_later(REPORT_INTERVAL, self._report)
        self._listen(pending, receiver, stream, several)

    def flush(self) -> None:
        """Sends the calls that were collected. Whatever else is sent to actors must not overtake them."""
        if self._batches.open:
            self._batches.flush()

    def _drop_idle_parts(self) -> None:
        if len(self._supervised) <= MAX_SUPERVISED:
            return
        busy = {pending.part for pending, *_ in self._pending.values()}
        newest = next(reversed(self._supervised))  # its call is about to be added
        for actors in [each for each in self._supervised if each not in busy and each is not newest]:
            self._supervised.pop(actors).cancel()

    def _part_failed(self, mesh: ActorMesh, actors: Any, fault: asyncio.Future[Any]) -> None:
        """Ends the calls on a part of a mesh. The next one asks Monarch again, and gets the same fault.

        Of the session's own meshes, this is how an actor is noticed that stopped itself. ``Supervision`` reports their
        failures, with the ranks, and ``Lifetimes`` what the session itself stops.
        """
        if self._supervised.get(actors) is fault:
            del self._supervised[actors]
        if fault.cancelled() or (error := fault.exception()) is None:
            return
        if not mesh.returned and (mesh.stopping or not reports_a_stop(str(error))):
            return
        failure, ranks = failure_of(error), ranks_of(mesh.region)
        silent = silent_position(str(error), len(ranks))
        dead = {} if silent is None else {ranks[silent]: failure.message}
        for pending, _, stream in list(self._pending.values()):
            if pending.part is actors:
                failed = pending.ranks_died(dead) or pending.fail(failure.model_copy(update={"mesh": pending.mesh}))
                self._finish(pending, failed, stream)

    def _listen(self, pending: PendingCall, receiver: Any, stream: int, several: bool) -> None:
        receiving = self._monarch.receive_several(receiver) if several else self._monarch.receive(receiver)
        self._receiving[pending.call] = receiving, receiver
        receiving.add_done_callback(functools.partial(self._arrived, pending, receiver, stream, several, 0))

    def _arrived(
        self,
        pending: PendingCall,
        receiver: Any,
        stream: int,
        several: bool,
        first: int,
        future: asyncio.Future[Any],
        _: object = None,
    ) -> None:
        """Takes the messages that have arrived, from ``first`` on, and waits for more.

        Nothing here may refer to itself: the cycle would keep the replies until a full garbage collection.
        """
        if future.cancelled() or pending.state is CallState.ENDED:
            return
        error = future.exception()
        if error is not None:
            self._finish(pending, pending.fail(failure_of(error)), stream)
            return
        messages: Sequence[Any] = future.result() if several else (future.result(),)
        for at in range(first, len(messages)):
            reply = self._monarch.reply_of(messages[at])
            cancelled = pending.state is CallState.CANCELLED
            up = self._pending[pending.call][1].up
            if reply.exception and up is not None and not up.done() and not cancelled:
                # Monarch itself answers a call to actors that it could not spawn, with little more than that it could
                # not. Why is known when the spawn has failed, which then ends the call.
                up.add_done_callback(functools.partial(self._arrived, pending, receiver, stream, several, at, future))
                return
            if self._memory.promised:
                self._memory.arrived(len(reply.data))
            unread = None if cancelled else self._output_before(pending, reply, self._unread_output)
            if unread is not None:
                if pending.adverb != "stream":
                    pending.apply(CallEvent.LAST_ARRIVED)
                rest = functools.partial(self._arrived, pending, receiver, stream, several, at + 1, future)
                unread.add_done_callback(functools.partial(self._take_printed, pending, reply, stream, rest))
                return
            if self._take(pending, reply, stream):
                return
        self._listen(pending, receiver, stream, several)

    def _take_printed(
        self, pending: PendingCall, reply: Reply, stream: int, rest: Callable[[], None], _: object
    ) -> None:
        """Takes a reply whose rank's output has been read, and then the ``rest``."""
        if not self._take(pending, reply, stream):
            rest()

    def _take(self, pending: PendingCall, reply: Reply, stream: int) -> bool:
        """Takes a reply. Returns whether the call has ended."""
        if pending.state is CallState.ENDED:
            return True
        references = _NO_MESHES
        if reply.references and pending.state is not CallState.CANCELLED:
            references = Adopted(objects=tuple(self._objects.add_reference(mesh) for mesh in reply.references))
        before = pending.state
        if self._finish(pending, pending.add_reply(reply, references), stream):
            return True
        if before is CallState.OPEN and pending.state is CallState.GATHERING:
            self._loop.call_later(GATHER_FAILURES, self._finish_early, pending, stream)
        return False

    def _replied_in_batch(self, call: BatchedCall, reply: Reply, message: dict[Any, Any]) -> None:
        """``message`` keeps what is known of output that has not been read, for all replies in a message."""
        pending = call.pending
        if pending.state in (CallState.COMPLETE, CallState.ENDED):
            return

        def unread_output(procs: int, ranks: Sequence[int]) -> asyncio.Future[None] | None:
            key = (ranks[0], len(ranks))  # which say all, within a batch
            if key not in message:
                message[key] = self._unread_output(procs, ranks)
            unread: asyncio.Future[None] | None = message[key]
            return unread

        if self._memory.promised:
            self._memory.arrived(len(reply.data))
        cancelled = pending.state is CallState.CANCELLED
        unread = None if cancelled else self._output_before(pending, reply, unread_output)
        if unread is None:
            self._take(pending, reply, call.stream)
            return
        if pending.adverb != "stream":
            pending.apply(CallEvent.LAST_ARRIVED)
        unread.add_done_callback(lambda _: self._take(pending, reply, call.stream))

    def _failed_in_batch(self, call: BatchedCall, error: BaseException) -> None:
        self._finish(call.pending, call.pending.fail(failure_of(error)), call.stream)

    def _output_before(
        self,
        pending: PendingCall,
        reply: Reply,
        unread_output: Callable[[int, Sequence[int]], asyncio.Future[None] | None],
    ) -> asyncio.Future[None] | None:
        """What the ranks have printed comes before the result: what to wait for, if ``reply`` is sent at once.

        An item of a stream waits for its own rank.
        """
        position = pending.chosen if pending.chosen is not None else reply.rank or 0
        last = pending.adverb == "stream"
        if not last and position not in pending.replies:
            last = len(pending.replies) + 1 >= pending.expected
        if pending.header is None or not (last or reply.printed):
            return None
        procs = self._pending[pending.call][1].procs
        if procs is None or not procs.number:
            return None
        ranks = pending.ranks
        if reply.printed and position < len(ranks):
            self._printed(procs.number, ranks[position], reply.printed)
        if not last:
            return None
        if pending.adverb in ("stream", "choose"):
            ranks = ranks[position : position + 1]
        return unread_output(procs.number, ranks)

    def awaits(self, procs: int, rank: int) -> bool:
        """Whether a call in flight may still get a reply of this process."""
        return any(
            mesh.procs is not None
            and mesh.procs.number == procs
            and rank in pending.ranks
            and pending.state is not CallState.CANCELLED
            for pending, mesh, _ in self._pending.values()
        )

    def _finish_early(self, pending: PendingCall, stream: int) -> None:
        if pending.state is CallState.GATHERING:
            self._finish(pending, pending.finish(), stream)

    def _finish(self, pending: PendingCall, response: Response | None, stream: int) -> bool:
        """Sends ``response``, if there is one. Returns whether the call has ended."""
        if response is not None:
            keeps = pending.header is not None and bool(pending.header.keep)
            self._respond(response, stream, kept=pending.header is None, keeps=keeps)  # a reload's response is small
        if pending.state is CallState.ENDED:
            ended = self._pending.pop(pending.call, None)
            receiving, receiver = self._receiving.pop(pending.call, (None, None))
            if receiving is not None and receiving.cancel():
                self._monarch.close(receiver)  # else a rank that never answers keeps the port and what has arrived
            if ended is not None and (totals := pending.totals) is not None:
                failed = bool(pending.failed) or (response is not None and isinstance(response.header, Failed))
                now = time.monotonic()
                seconds = now - pending.started
                self._metrics.call_ended(seconds, failed=failed)
                totals.ended += 1
                totals.failed += failed
                totals.seconds += seconds
                if pending.expected > 1:
                    timeline = pending.timeline(now, failed=failed)
                    totals.timelines.append(timeline)
                    if timeline.compared is not None:
                        totals.last_ranks.append(timeline.compared)
            if self._memory.promised:
                self._memory.call_ended()  # replies that come late are dropped
            if pending.on_end is not None:
                pending.on_end(response)
            if not self._pending:
                self._idle()  # no other response is due that could leave in the same websocket message
        return pending.state is CallState.ENDED

    def _report(self) -> None:
        """Sends the progress of the calls that take long, if it has changed."""
        self._report_timer = self._loop.call_later(REPORT_INTERVAL, self._report) if self._pending else None
        now = time.monotonic()
        targets: set[int] = set()
        changed = []
        for pending, mesh, _ in islice(self._pending.values(), MAX_REPORTED):
            if now - pending.started < REPORT_INTERVAL:
                break  # the others are younger
            progress = pending.progress(now, first=id(mesh) not in targets, untried=mesh.untried)
            targets.add(id(mesh))
            if progress is not None and pending.state is not CallState.CANCELLED:
                changed.append(progress)
        for start in range(0, len(changed), CALLS_PER_REPORT):
            self._send(Progress(calls=tuple(changed[start : start + CALLS_PER_REPORT])))

    def _respond(self, response: Response, stream: int, *, kept: bool = False, keeps: bool = False) -> None:
        """``kept``: the client fetches values that stay. ``keeps``: the call has kept values, and describes them."""
        header, problem = response.header, ""
        if sum(map(len, response.buffers)) > SMALL and not keeps and not isinstance(header, Failed):
            problem = self._memory.refuse_reply(response.buffers, kept=kept)
        if not problem:
            try:
                self._send(header, response.buffers, stream=stream)
            except MessageTooLarge as error:
                remedy = (
                    "The values stay in the cluster: fetch a slice of the kept mesh, or pass them to other calls"
                    if kept
                    else "Leave the values in the cluster, with endpoint.keep() in place of call()"
                )
                problem = f"the gateway cannot send the reply: {error}. {remedy}"
            else:
                return
        failure = Failure(kind="invalid", message=problem)
        call, rank = getattr(header, "call", 0), getattr(header, "rank", None)
        self._send(Failed(call=call, rank=rank, failure=failure), stream=stream)

    def validate_state(self) -> None:
        """Raises AssertionError if an invariant does not hold between two callbacks of the event loop."""
        assert self._report_timer is not None or not self._pending, "nothing reports the progress of these calls"
        for number, (pending, _, _) in self._pending.items():
            assert number == pending.call
            assert pending.state is not CallState.ENDED
            pending.validate_state()

    def statuses(self, limit: int, numbers: Mapping[int, int]) -> tuple[list[CallStatus], int]:
        """The oldest calls in flight, and how many there are. ``numbers``: of meshes, by the ids of their records."""
        now = time.monotonic()
        oldest = islice(self._pending.values(), limit)  # in the order of their start
        found = [status_of(pending, mesh, numbers.get(id(mesh), 0), now) for pending, mesh, _ in oldest]
        return found, len(self._pending)

    def timelines(self, limit: int) -> list[tuple[Timeline, ActorMesh]]:
        """Of the program's oldest calls to several ranks in flight."""
        several = (
            (pending.timeline(), mesh)
            for pending, mesh, _ in self._pending.values()
            if pending.expected > 1 and pending.totals is not None
        )
        return list(islice(several, limit))

    def in_flight(self) -> Counter[tuple[int, str]]:
        """The number of calls in flight by the id of their mesh's record, and their endpoint."""
        return Counter((id(mesh), pending.endpoint) for pending, mesh, _ in self._pending.values())

    def fail(self, mesh: ActorMesh) -> None:
        """Ends the calls on ``mesh`` that wait for dead ranks, or all of them if the mesh failed."""
        for pending, target, stream in list(self._pending.values()):
            if target is mesh:
                response = pending.fail(mesh.failed) if mesh.failed else pending.ranks_died(mesh.dead)
                self._finish(pending, response, stream)


def _cancelled(header: Call) -> Response:
    """The answer to a call that is cancelled before it is sent to actors."""
    return Response(Failed(call=header.call, failure=Failure(kind="cancelled", message="")))


def _ended(prepared: Prepared, pending: PendingCall, response: Response | None) -> None:
    prepared.ended(response, pending)


def status_of(pending: PendingCall, mesh: ActorMesh, number: int, now: float) -> CallStatus:
    """``now`` is a time of ``time.monotonic``."""
    waiting = pending.waiting()
    return CallStatus(
        mesh=pending.mesh,
        endpoint=pending.endpoint,
        age=round(now - pending.started, 3),
        total=pending.expected,
        answered=len(pending.replies),
        waiting=waiting,
        procs=mesh.procs.name if mesh.procs is not None else "",
        processes={rank: rank for rank in waiting},  # earlier versions counted the others in the slice
        cancelled=pending.state is CallState.CANCELLED,
        mesh_number=number,
    )
