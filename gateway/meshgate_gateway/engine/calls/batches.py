"""Short calls that arrive while others are open leave together: one message of Monarch's, answered together.

A call on its own leaves at once (``Calling.start``). While calls are open, those that go to the same actors and arrive
in the same turn of the event loop are collected, or while two earlier batches are under way to these actors, for at
most ``PATIENCE``. A batch is expected to run for ``MAX_SECONDS`` at most.
Only calls that Monarch would have run one right after the other are collected, and whatever else is sent waits for
``flush``, so the actors see everything in the order in which it arrived. What an endpoint takes is known from the
replies to its calls in batches. While it is unknown, a batch has one call; if it is long, calls are sent alone, but one
in some is measured again.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meshgate_gateway.engine.calls.pending_calls import CallState, PendingCall
from meshgate_gateway.engine.monarch.interface import CallSender, Reply
from meshgate_gateway.engine.objects.records import ActorMesh

OPEN_CALLS = 8  # below this number of open calls, a call leaves at once
MAX_CALLS = 128
MAX_BYTES = 64 * 1024
MAX_CALL_BYTES = 16 * 1024
PATIENCE = 0.001  # seconds that a batch waits for earlier ones
UNDER_WAY = 2  # batches to the same actors, from which on the next one waits
MAX_SECONDS = 0.002  # that the calls of a batch may take together: peers that call the same actors wait for it


class BatchedCall(NamedTuple):
    """A call of a batch; its responses go to the client on ``stream``."""

    pending: PendingCall
    stream: int
    payload: Any


@dataclass(slots=True, eq=False)
class CallBatch:
    """Calls to ``part``, some ranks of ``mesh``."""

    mesh: ActorMesh
    part: Any
    ranks: frozenset[int]
    calls: list[BatchedCall] = field(default_factory=list)
    nbytes: int = 0
    seconds: float = 0.0
    unended: int = 0  # of the calls that were sent
    receiving: asyncio.Future[Any] | None = None
    receiver: Any = None


class Batches:
    """``replied(call, reply, message)`` gets each reply; those with the same ``message`` have arrived together.
    ``failed(call, error)``: no reply will come."""

    def __init__(
        self,
        monarch: CallSender,
        replied: Callable[[BatchedCall, Reply, dict[Any, Any]], None],
        failed: Callable[[BatchedCall, BaseException], None],
    ) -> None:
        self._monarch, self._replied, self._failed = monarch, replied, failed
        self._loop = asyncio.get_running_loop()
        self.open: dict[Any, CallBatch] = {}  # by the part of a mesh, in the order of their first calls
        self._under_way: Counter[Any] = Counter()  # batches, by the part

    def add(self, pending: PendingCall, mesh: ActorMesh, stream: int, payload: Any) -> bool:
        """Adds a call to ``pending.part`` of ``mesh``, whose processes this engine has set up, unless it must be sent
        alone. Returns whether it has."""
        header, totals = pending.header, pending.totals
        if header is None or totals is None or header.explicit_port:
            return False
        if mesh.up is not None and not mesh.up.done():
            return False  # the actors may turn out not to exist
        if totals.expected is not None and totals.expected > MAX_SECONDS:
            totals.sent_alone()
            return False
        nbytes = self._monarch.size_in_batch(payload)
        if nbytes is None or nbytes > MAX_CALL_BYTES:
            return False
        seconds = MAX_SECONDS if totals.expected is None else totals.expected
        batch = self._batch(pending, mesh, nbytes, seconds)
        batch.calls.append(BatchedCall(pending, stream, payload))
        batch.nbytes += nbytes
        batch.seconds += seconds
        return True

    def _batch(self, pending: PendingCall, mesh: ActorMesh, nbytes: int, seconds: float) -> CallBatch:
        """The open batch for a call, or a new one. Calls to the same actors leave in the order of their arrival."""
        batch = self.open.get(pending.part)
        if (
            batch is not None
            and len(batch.calls) < MAX_CALLS
            and batch.nbytes + nbytes <= MAX_BYTES
            and batch.seconds + seconds <= MAX_SECONDS
        ):
            return batch
        if any(other.mesh is mesh and not other.ranks.isdisjoint(pending.ranks) for other in self.open.values()):
            self.flush()
        if self._under_way[pending.part] >= UNDER_WAY:
            self._loop.call_later(PATIENCE, self.flush)
        else:
            self._loop.call_soon(self.flush)
        batch = self.open[pending.part] = CallBatch(mesh, pending.part, frozenset(pending.ranks))
        return batch

    def flush(self) -> None:
        """Sends the open batches."""
        batches, self.open = self.open, {}
        for batch in batches.values():
            batch.calls = [call for call in batch.calls if call.pending.state is not CallState.ENDED]
            if not batch.calls:
                continue
            try:
                calls = [(call.pending.endpoint, call.payload, call.pending.call) for call in batch.calls]
                batch.receiver = self._monarch.call_batch(batch.part, calls)
            except BaseException as error:  # noqa: BLE001 - Monarch's panics derive from BaseException alone
                for call in batch.calls:
                    self._failed(call, error)
                continue
            batch.calls = [call._replace(payload=None) for call in batch.calls]
            self._under_way[batch.part] += 1
            batch.unended = len(batch.calls)
            for call in batch.calls:
                call.pending.on_end = functools.partial(self._call_ended, batch, call.pending)
            self._listen(batch)

    def _listen(self, batch: CallBatch) -> None:
        batch.receiving = self._monarch.receive(batch.receiver)
        batch.receiving.add_done_callback(functools.partial(self._arrived, batch))

    def _arrived(self, batch: CallBatch, future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            for call in batch.calls:
                self._failed(call, error)
            return
        message: dict[Any, Any] = {}
        for number, seconds, reply in self._monarch.replies_of(future.result()):
            if number is not None:
                call = batch.calls[number]
                assert call.pending.totals is not None
                call.pending.totals.took(seconds)
                self._replied(call, reply, message)
                continue
            for call in batch.calls:  # Monarch itself has replied
                self._replied(call, reply, message)
        if any(call.pending.state not in (CallState.COMPLETE, CallState.ENDED) for call in batch.calls):
            self._listen(batch)

    def _call_ended(self, batch: CallBatch, pending: PendingCall, response: object) -> None:
        """A call has ended, by its replies, a death or a stop; with the last one, so has the batch."""
        pending.on_end = None
        batch.unended -= 1
        if batch.unended:
            return
        if batch.receiving is not None and batch.receiving.cancel():
            self._monarch.close(batch.receiver)
        self._under_way[batch.part] -= 1
        if not self._under_way[batch.part]:
            del self._under_way[batch.part]
        self._loop.call_soon(self.flush)  # this call may be one of many that end now
