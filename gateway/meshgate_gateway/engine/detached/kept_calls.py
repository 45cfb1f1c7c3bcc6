"""The calls of a detached session: which are running, and the results that no holder has read.

A result is kept until the holder has read it, and for a while after that, if there is space: a holder that is
killed just after reading a result has not used it yet. What was read, or dropped by the program, makes room first.

A new holder receives a list of the results that are kept. What it reads of them must not push out the others, so those
that could have made room before count no more until it has read or dropped them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from meshgate_gateway.engine.detached.spool import Blob, Spool
from meshgate_wire import MessageTooLarge
from meshgate_wire.messages import Call, Failed, Failure, Header, Item, KeptCall, Returned, Values, stream_of

MEMORY = 64 * 2**20
DISK = 4 * 2**30
MAX_READ_CALLS = 1024  # whose results are kept although they were read
MAX_READ_BYTES = 64 * 2**20
MAX_QUEUED = 8 * 2**20  # bytes that wait on the wire, above which fetched results wait here

Reply = Values | Item | Failed
State = Literal["in flight", "finished", "read", "lost"]


@dataclass(slots=True, eq=False)
class _Call:
    header: Call
    received_at: float
    wanted: bool  # its holder waits for the replies; those of an earlier holder are sent when fetched
    replies: list[tuple[Reply, Blob]] = field(default_factory=list)
    read: bool = False
    released: bool = False
    evictable: bool = False
    counted: int = 0  # its part of the bytes that can be evicted
    lost: str = ""
    reported: bool = False  # the holder has been sent that it is lost
    returned: bool = False  # its replies are those that the holder sends back


class KeptCalls:
    """``send`` sends a reply to the holder; ``queued`` is how many bytes wait to be sent; ``running(number)``:
    whether a call has not been answered completely."""

    def __init__(
        self,
        send: Callable[[Header, Sequence[bytes | memoryview], int], None],
        queued: Callable[[], int],
        running: Callable[[int], bool],
        *,
        spool: Spool | None = None,
    ) -> None:
        self._send, self._queued, self._running = send, queued, running
        self._spool = spool or Spool(MEMORY, DISK, MEMORY)
        self._calls: dict[int, _Call] = {}
        self._evictable: deque[_Call] = deque()  # oldest first
        self._evictable_bytes = 0
        self._listed: dict[int, _Call] = {}  # on the holder's list, evictable before; oldest first
        self._unsent: deque[tuple[_Call, int]] = deque()  # replies that the holder waits for
        self._before_holder = 0  # the last call of earlier holders

    def received(self, header: Call, given: Iterable[int] = ()) -> None:
        """A call of the current holder has arrived. ``given``: the positions of the replies that it got already, as a
        stream does before its session is detached.

        Of a call whose results stay in their processes the reply only describes them, which is of use to its holder
        alone.
        """
        if header.adverb == "broadcast" or header.keep:
            return
        call = self._calls[header.call] = _Call(header, time.monotonic(), wanted=True)
        for position in given:
            failure = Failure(kind="invalid", message="this result arrived before the session was detached")
            self._store(call, Failed(call=header.call, rank=position, failure=failure), ())

    def keep(self, header: Reply, buffers: Sequence[bytes | memoryview], *, congested: bool) -> bool:
        """Keeps a reply. Returns whether it is sent from here, when fetched or when the wire is no longer congested, or
        is dropped: of what an earlier holder has waited for, a later one knows only the calls of endpoints."""
        call = self._calls.get(header.call)
        if call is None:
            return header.call <= self._before_holder
        if call.header.adverb != "stream":
            self._drop_replies(call)  # the last reply replaces one that was too large
        elif isinstance(header, Failed) and call.replies and _rank_of(call.replies[-1][0]) == header.rank is not None:
            self._spool.drop(call.replies.pop()[1])  # so does that of this rank
        self._store(call, header, buffers)
        if call.released:
            self._make_evictable(call)
        if call.reported:
            return True
        if call.wanted and not congested and not self._unsent:
            return False
        if call.wanted and call.replies:
            self._unsent.append((call, len(call.replies) - 1))
            return True
        return not call.wanted

    def returned(self, header: Returned, buffers: Sequence[bytes | memoryview]) -> None:
        """The holder sends back a reply that had left before the session was detached."""
        number = header.request.call
        if number not in self._calls:
            self.received(header.request, range(header.given))
            if number in self._calls:
                self._calls[number].returned = True
        call = self._calls.get(number)
        if call is not None and call.returned:
            self._store(call, header.reply, buffers)

    def _store(self, call: _Call, header: Reply, buffers: Sequence[bytes | memoryview]) -> None:
        blob = self._spool.put(buffers)
        while blob is None and (self._listed or self._evictable):
            self._evict(self._listed.pop(next(iter(self._listed))) if self._listed else self._evictable.popleft())
            blob = self._spool.put(buffers)
        if blob is None:
            nbytes = sum(map(len, buffers))
            call.lost = f"no space was left to keep its result ({nbytes} bytes) until it was read"
            self._drop_replies(call)
        elif not call.lost:
            call.replies.append((header, blob))
        else:
            self._spool.drop(blob)

    # --- what the holder does

    def fetch(self, numbers: Iterable[int]) -> None:
        """The holder waits for the results of these calls."""
        for number in numbers:
            call = self._calls.get(number)
            if call is None or call.lost:
                self._send(_lost(number, call.lost if call is not None else "it is not kept any more"), (), 0)
            elif not call.wanted:
                call.wanted = True
                self._listed.pop(number, None)  # others make room until it has been read
                self._unsent.extend((call, index) for index in range(len(call.replies)))
        self.feed()

    def feed(self) -> None:
        """Sends fetched replies while the wire has space."""
        while self._unsent and self._queued() < MAX_QUEUED:
            call, index = self._unsent.popleft()
            if index >= len(call.replies):  # dropped since, for lack of space
                if not call.reported:
                    call.reported = True
                    lost = _lost(call.header.call, call.lost or "it made room for others")
                    self._send(lost, (), stream_of(call.header.target.object))
                continue
            header, blob = call.replies[index]
            stream = stream_of(call.header.target.object)
            try:
                self._send(header, self._spool.get(blob), stream)
            except (MessageTooLarge, OSError) as error:
                failure = Failure(kind="invalid", message=f"a kept result was not sent: {error}")
                self._send(Failed(call=header.call, rank=_rank_of(header), failure=failure), (), stream)

    def mark_read(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if (call := self._calls.get(number)) is not None:
                call.read = True
                self._make_evictable(call)

    def mark_released(self, numbers: Iterable[int]) -> None:
        """The program has dropped these calls without reading them: they are kept while there is space."""
        for number in numbers:
            if (call := self._calls.get(number)) is not None:
                call.released = True
                if not self._running(number):
                    self._make_evictable(call)

    def holder_changed(self, last_call: int = 0) -> None:
        """The replies to all calls so far wait until the new holder fetches them. Its own come after ``last_call``."""
        self._before_holder = last_call
        self._unsent.clear()
        self._end_returned_streams()
        for call in self._calls.values():
            call.wanted = call.released = call.reported = False
        fetched = [call for call in self._calls.values() if call.read]  # perhaps, without being read again
        for call in (*self._listed.values(), *self._take_evictable(), *fetched):
            self._make_evictable(call)  # both together are within the limits again
        self._listed = {call.header.call: call for call in self._take_evictable()}

    def _end_returned_streams(self) -> None:
        """Nothing runs any more that gives the results which the holder has not sent back: the next one would wait for
        them for ever. It ignores the failure of a stream that is complete."""
        for number, call in list(self._calls.items()):
            if call.returned and call.header.adverb == "stream":
                message = "this result was on its way to the program that left, which has not sent it back"
                self._store(call, Failed(call=number, failure=Failure(kind="invalid", message=message)), ())
            call.returned = False

    # --- what there is

    def describe(self) -> Iterator[KeptCall]:
        """All calls, in the order in which they were made."""
        now = time.monotonic()
        for number, call in sorted(self._calls.items()):  # some were sent back late
            header = call.header
            assert header.adverb != "broadcast"
            yield KeptCall(
                call=number,
                target=header.target,
                endpoint=header.endpoint,
                adverb=header.adverb,
                tag=header.tag,
                age=max(0.0, now - call.received_at),
                state=self._state(call),
                reason=call.lost[:256],
            )

    def _state(self, call: _Call) -> State:
        if call.lost:
            return "lost"
        if self._running(call.header.call) or not call.replies:
            return "in flight"
        return "read" if call.read else "finished"

    def counts(self) -> dict[State, int]:
        counts: dict[State, int] = {"in flight": 0, "finished": 0, "read": 0, "lost": 0}
        for call in self._calls.values():
            counts[self._state(call)] += 1
        return counts

    # --- space

    def _make_evictable(self, call: _Call) -> None:
        if call.evictable:
            return
        self._listed.pop(call.header.call, None)
        call.evictable = True
        call.counted = sum(blob.nbytes for _, blob in call.replies)
        self._evictable.append(call)
        self._evictable_bytes += call.counted
        while len(self._evictable) > MAX_READ_CALLS or self._evictable_bytes > MAX_READ_BYTES:
            self._evict(self._evictable.popleft())

    def _take_evictable(self) -> list[_Call]:
        calls = list(self._evictable)
        self._evictable.clear()
        self._evictable_bytes = 0
        for call in calls:
            call.evictable, call.counted = False, 0
        return calls

    def _evict(self, call: _Call) -> None:
        self._drop_replies(call)
        self._calls.pop(call.header.call, None)

    def _drop_replies(self, call: _Call) -> None:
        self._evictable_bytes -= call.counted
        call.counted = 0
        for _, blob in call.replies:
            self._spool.drop(blob)
        call.replies.clear()

    def close(self) -> None:
        self._spool.close()


def _lost(number: int, reason: str) -> Failed:
    message = f"the result of call {number} is lost: {reason}"
    return Failed(call=number, failure=Failure(kind="invalid", message=message))


def _rank_of(reply: Reply) -> int | None:
    """The rank whose reply to a stream it is; None if it ends the call."""
    return None if isinstance(reply, Values) else reply.rank
