"""Calls that wait for replies: their states, which ranks have replied, and what to answer the client.

Pure: replies and deaths go in, messages for the client come out. A call that fails on some ranks is answered shortly
after the first failure, so that the same exception on many ranks becomes one message.

``PendingCall.apply`` is the only place that assigns a state; an event that the table does not list for the present
state is a defect of the engine and raises InvalidTransition.
"""

from __future__ import annotations

import enum
import hashlib
import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeAlias

from meshgate_gateway.engine.monarch.interface import Reply
from meshgate_gateway.engine.objects.records import CallTotals, Timeline
from meshgate_wire.message_codec import with_call_number
from meshgate_wire.messages import Adopted, Call, CallProgress, ErrorGroup, Failed, Failure, Header, Item, Values

GATHER_FAILURES = 0.25  # seconds between a call's first failure and its answer
MAX_RANKS_NAMED = 64
MAX_DISTINCT_ERRORS = 16
MAX_TIMED = 16  # replies, and ranks without one, in a timeline
LATE_SECONDS = 0.01  # after half of the ranks have replied; less may be the network's delay
LATE_SHARE = 0.1  # of the time that the call took
_PLAIN_VALUES = Values(call=0)
_data_of = operator.attrgetter("data")

Adverb: TypeAlias = Literal["call", "call_one", "choose", "stream", "broadcast"]
Data: TypeAlias = bytes | memoryview


class CallState(enum.Enum):
    """Of a call that was sent to actors."""

    OPEN = "open"
    """Replies are missing, and no rank has raised; or it is a stream, whose replies are passed on one by one."""
    GATHERING = "gathering"
    """A rank has raised. The answer waits a moment for others that raise the same."""
    COMPLETE = "complete"
    """The last reply has arrived, and waits for what the ranks have printed. Failures come too late."""
    CANCELLED = "cancelled"
    """The program has cancelled it, which is the answer. Replies, which are dropped, show that ranks are free again."""
    ENDED = "ended"
    """It is answered. Whatever still arrives is dropped."""


class CallEvent(enum.Enum):
    """What happens to a call."""

    RAISED = "raised"
    """A rank's reply is an exception, and replies of others are missing."""
    LAST_ARRIVED = "last arrived"
    """The last reply is here, but not what the ranks have printed before."""
    CANCELLED = "cancelled"
    """The program wants no result any more."""
    ANSWERED = "answered"
    """The answer is made: of all replies, or of those that came while failures were gathered. Or a call that was
    cancelled has its last reply."""
    ABANDONED = "abandoned"
    """A rank has died, or the whole mesh has failed: no more replies are expected."""


_S, _E = CallState, CallEvent

TRANSITIONS: dict[CallState, dict[CallEvent, CallState]] = {
    _S.OPEN: {
        _E.RAISED: _S.GATHERING,
        _E.LAST_ARRIVED: _S.COMPLETE,
        _E.CANCELLED: _S.CANCELLED,
        _E.ANSWERED: _S.ENDED,
        _E.ABANDONED: _S.ENDED,
    },
    _S.GATHERING: {
        _E.RAISED: _S.GATHERING,
        _E.LAST_ARRIVED: _S.COMPLETE,
        _E.CANCELLED: _S.CANCELLED,
        _E.ANSWERED: _S.ENDED,
        _E.ABANDONED: _S.ENDED,
    },
    _S.COMPLETE: {
        _E.ANSWERED: _S.ENDED,
    },
    _S.CANCELLED: {
        _E.ANSWERED: _S.ENDED,
        _E.ABANDONED: _S.ENDED,
    },
    _S.ENDED: {},
}


class InvalidTransition(RuntimeError):
    """A defect of the engine: ``event`` is not possible in ``state``."""

    def __init__(self, call: int, state: CallState, event: CallEvent) -> None:
        self.state, self.event = state, event
        super().__init__(f"call {call} is {state.value}: event {event.value!r} is not possible")


class Response(NamedTuple):
    """A message that answers a call. ``last``: no other follows."""

    header: Header
    buffers: tuple[Data, ...] = ()
    last: bool = True


@dataclass(slots=True)
class PendingCall:
    """One call. ``ranks`` are the base ranks it went to, in the target's order; replies count in that order.

    ``host_of`` gives the host of a base rank. ``chosen`` is the position of the only rank that got the call, if the
    engine chose one.
    """

    call: int
    adverb: Adverb
    mesh: str
    endpoint: str
    ranks: Sequence[int]
    host_of: Callable[[int], str]
    chosen: int | None = None
    header: Call | None = None  # as the client sent it; None for calls that are not of a program
    part: Any = None  # Monarch's reference to the actors that it went to
    totals: CallTotals | None = None  # in which it counts when it ends; None for calls that are not of a program
    replies: dict[int, Reply] = field(default_factory=dict)  # by position in ``ranks``
    objects: dict[int, Adopted] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    state: CallState = CallState.OPEN
    on_success: Callable[[], None] | None = None  # called when every rank has replied without an exception
    on_end: Callable[[Response | None], None] | None = None  # called with the answer, when the call has ended
    started: float = field(default_factory=time.monotonic)
    reported: tuple[int, bool, bool] | None = None  # what the client was last sent of its progress
    times: list[float] = field(default_factory=list)  # of several ranks: when each of ``replies`` arrived
    last_at: float = 0.0  # when the last reply arrived, if it has waited for what the ranks have printed
    cancelled: bool = False

    def apply(self, event: CallEvent) -> None:
        """Raises InvalidTransition."""
        after = TRANSITIONS[self.state].get(event)
        if after is None:
            raise InvalidTransition(self.call, self.state, event)
        self.state = after
        if event is _E.LAST_ARRIVED:
            self.last_at = time.monotonic()

    def validate_state(self) -> None:
        """Raises AssertionError if an invariant does not hold."""
        missing, stream = self.expected - len(self.replies), self.adverb == "stream"
        assert self.failed <= self.replies.keys(), (self.failed, self.replies.keys())
        assert self.objects.keys() <= self.replies.keys()
        assert len(self.times) == (len(self.replies) if self.expected > 1 else 0)
        assert self.state is _S.ENDED or missing > 0, (self.state, missing)
        assert self.state is not _S.OPEN or stream or not self.failed, self.failed
        assert self.state is not _S.CANCELLED or (self.cancelled and not self.objects)
        assert not self.cancelled or self.state in (_S.CANCELLED, _S.ENDED), self.state
        assert self.state is not _S.GATHERING or (self.failed and not stream)
        assert self.state is not _S.COMPLETE or (missing == 1 and not stream), missing

    @property
    def expected(self) -> int:
        return len(self.ranks) if self.chosen is None else 1

    def add_reply(self, reply: Reply, references: Adopted) -> Response | None:
        """Adds a reply, and returns the response to send now, if any."""
        position = self.chosen if self.chosen is not None else reply.rank or 0
        if self.state is _S.ENDED or position in self.replies:
            return None  # an endpoint with an explicit port may send more than one
        self.replies[position] = reply
        expected = self.expected
        if expected > 1:
            self.times.append(self.last_at or time.monotonic())
        if references.objects:
            self.objects[position] = references
        if reply.exception:
            self.failed.add(position)
        if self.state is _S.CANCELLED:
            self.replies[position] = reply._replace(data=b"")
            if len(self.replies) >= expected:
                self.apply(_E.ANSWERED)
            return None
        if self.adverb == "stream":
            if last := len(self.replies) >= expected:
                self.apply(_E.ANSWERED)
            if reply.exception:
                failed = Failed(call=self.call, rank=position, failure=self._actor_failure([position]))
                return Response(failed, (reply.data,), last=last)
            return Response(Item(call=self.call, rank=position, objects=references), (reply.data,), last=last)
        if len(self.replies) >= expected:
            return self.finish()
        if reply.exception:
            self.apply(_E.RAISED)
        return None

    def finish(self) -> Response:
        """Ends the call with what is known now: all values, or the failures so far."""
        self.apply(_E.ANSWERED)
        if self.failed:
            return self._failures()
        positions = sorted(self.replies)
        if self.objects or self.chosen is not None:
            header = Values(
                call=self.call,
                ranks=tuple(positions) if self.chosen is not None else None,
                objects={place: self.objects[at] for place, at in enumerate(positions) if at in self.objects},
            )
        else:
            header = with_call_number(_PLAIN_VALUES, self.call)
        if self.on_success is not None and len(self.replies) >= self.expected:
            self.on_success()
        return Response(header, tuple(map(_data_of, map(self.replies.__getitem__, positions))))

    @property
    def half_at(self) -> float | None:
        """When half of several ranks had replied; None: they have not."""
        half = (self.expected + 1) // 2
        return self.times[half - 1] if len(self.times) >= half else None

    def last_rank(self) -> tuple[int, float] | None:
        """Of a call to several ranks that all have returned: the base rank that replied last, and how many seconds
        after half of the ranks; 0 if that is too little to tell anything."""
        half = self.half_at
        if half is None or self.failed or self.cancelled or len(self.replies) < self.expected:
            return None  # ranks that cannot be interrupted are not late
        last = next(reversed(self.replies))
        if last >= len(self.ranks):
            return None  # a reply of a rank that was not called
        late = self.times[-1] - half
        enough = max(LATE_SECONDS, LATE_SHARE * (self.times[-1] - self.started))
        return self.ranks[last], late if late > enough else 0.0

    def timeline(self, ended: float | None = None, *, failed: bool = False) -> Timeline:
        """Of a call to several ranks. ``ended``: when it has, and ``failed`` whether with a failure; None: not yet."""
        raised: Iterable[tuple[int, float]] = ()
        if self.failed:
            raised = (each for each in zip(self.replies, self.times, strict=True) if each[0] in self.failed)
        missing: Iterable[int] = ()
        if len(self.replies) < self.expected:
            missing = (at for at in range(len(self.ranks)) if at not in self.replies)
        return Timeline(
            self.call,
            self.endpoint,
            self.ranks,
            self.started,
            ended,
            failed,
            self.cancelled,
            len(self.replies),
            self.times[0] if self.times else None,
            self.half_at,
            tuple(islice(zip(reversed(self.replies), reversed(self.times), strict=True), MAX_TIMED)),
            tuple(islice(raised, MAX_TIMED)),
            tuple(islice(missing, MAX_TIMED)),
            self.last_rank(),
        )

    def cancel(self) -> Response | None:
        """The program wants no result any more. Returns the answer, unless it has another one."""
        if _E.CANCELLED not in TRANSITIONS[self.state]:
            return None
        self.apply(_E.CANCELLED)
        self.cancelled = True
        self.objects.clear()
        waiting = self.waiting() if self.chosen is None else {}
        failure = Failure(
            kind="cancelled",
            message="",
            mesh=self.mesh,
            ranks=tuple(waiting),
            hosts=waiting,
            total=len(self.ranks),
            unanswered=self.expected - len(self.replies),
        )
        return Response(Failed(call=self.call, failure=failure))

    def waiting(self) -> dict[int, str]:
        """The first base ranks that have not replied, and their hosts."""
        waiting = (at for at in range(len(self.ranks)) if at not in self.replies)
        return self._hosts(list(islice(waiting, MAX_RANKS_NAMED)))

    def progress(self, now: float, *, first: bool, untried: bool) -> CallProgress | None:
        """How far it is, if the client has not been sent that yet. ``first``: no earlier call to the actors is open.
        ``untried``: no call to them has ended."""
        state = (len(self.replies), first, untried)
        if state == self.reported:
            return None
        self.reported = state
        return CallProgress(
            call=self.call,
            total=self.expected,
            answered=len(self.replies),
            age=now - self.started,
            waiting=self.waiting(),
            first=first,
            untried=untried,
        )

    def ranks_died(self, dead: Mapping[int, str]) -> Response | None:
        """Ends the call if a rank it waits for is among ``dead``, which maps base ranks to reports."""
        if not dead or _E.ABANDONED not in TRANSITIONS[self.state]:
            return None
        called = range(len(self.ranks)) if self.chosen is None else (self.chosen,)
        lost = [at for at in called if self.ranks[at] in dead and at not in self.replies]
        if not lost:
            return None
        if self._abandon():
            return None
        hosts = self._hosts(lost)
        failure = Failure(
            kind="supervision",
            message=dead[self.ranks[lost[0]]],
            mesh=self.mesh,
            ranks=tuple(hosts),
            hosts=hosts,
            total=len(self.ranks),
            unanswered=self.expected - len(self.replies),
        )
        return Response(Failed(call=self.call, failure=failure))

    def fail(self, failure: Failure) -> Response | None:
        """Ends the call with ``failure``, unless it has ended or its last reply has arrived."""
        if _E.ABANDONED not in TRANSITIONS[self.state]:
            return None
        return None if self._abandon() else Response(Failed(call=self.call, failure=failure))

    def _abandon(self) -> bool:
        """No more replies are expected. Returns whether it has its answer: it was cancelled."""
        cancelled = self.state is _S.CANCELLED
        self.apply(_E.ABANDONED)
        return cancelled

    def _failures(self) -> Response:
        groups: dict[bytes, list[int]] = {}
        for position in sorted(self.failed):
            digest = hashlib.blake2b(self.replies[position].data, digest_size=16).digest()
            groups.setdefault(digest, []).append(position)
        ordered = sorted(groups.values(), key=len, reverse=True)
        sent, rest = ordered[:MAX_DISTINCT_ERRORS], ordered[MAX_DISTINCT_ERRORS:]
        errors = [self._group(positions, buffer) for buffer, positions in enumerate(sent)]
        if rest:
            errors.append(self._group(sorted(position for positions in rest for position in positions), None))
        failure = self._actor_failure(sorted(self.failed)).model_copy(update={"errors": tuple(errors)})
        buffers = tuple(self.replies[positions[0]].data for positions in sent)
        return Response(Failed(call=self.call, failure=failure), buffers)

    def _actor_failure(self, positions: Sequence[int]) -> Failure:
        hosts = self._hosts(positions)
        return Failure(
            kind="actor",
            message=f"Actor call {self.mesh}.{self.endpoint} failed.",
            mesh=self.mesh,
            ranks=tuple(hosts),
            hosts=hosts,
            errors=(self._group(positions, 0),),
            total=len(self.ranks),
            unanswered=self.expected - len(self.replies),
        )

    def _hosts(self, positions: Sequence[int]) -> dict[int, str]:
        return {rank: self.host_of(rank) for rank in self._ranks(positions)}

    def _ranks(self, positions: Sequence[int]) -> tuple[int, ...]:
        """The first base ranks: people find them in output, stacks and the status under these numbers."""
        named = positions[:MAX_RANKS_NAMED]
        return tuple(self.ranks[at] for at in named if at < len(self.ranks))  # else of a rank that was not called

    def _group(self, positions: Sequence[int], buffer: int | None) -> ErrorGroup:
        return ErrorGroup(ranks=self._ranks(positions), count=len(positions), buffer=buffer)
