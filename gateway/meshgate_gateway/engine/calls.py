"""Calls under way: which ranks have answered, and what to say when all have, or when some cannot.

Pure: replies and deaths go in, the answer to send comes out. A call that an endpoint fails is told soon after the
first failure, with a short wait for its siblings, so that the same error of many ranks is one message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias

from meshgate_gateway.engine.monarch import Reply
from meshgate_wire.messages import Adopted, ErrorGroup, Failed, Failure, Header, Item, Values, numbered

GATHER_FAILURES = 0.25  # seconds between a call's first failure and its report
MAX_RANKS_NAMED = 64
_PLAIN_VALUES = Values(call=0)
MAX_DISTINCT_ERRORS = 16

Adverb: TypeAlias = Literal["call", "call_one", "choose", "stream", "broadcast"]
Data: TypeAlias = bytes | memoryview


class HostOf(Protocol):
    def get(self, rank: int, default: str = ..., /) -> str:
        """The name of the host of a base rank."""


class Answer(NamedTuple):
    """A message to the laptop; ``last`` when the call is over."""

    header: Header
    buffers: tuple[Data, ...] = ()
    last: bool = True


@dataclass(slots=True)
class Pending:
    """One call. ``ranks`` are the base ranks it went to, in the target's order; replies count in that order."""

    call: int
    adverb: Adverb
    mesh: str
    endpoint: str
    ranks: Sequence[int]
    host_of: HostOf
    answered: dict[int, Reply] = field(default_factory=dict)  # by position
    objects: dict[int, Adopted] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    over: bool = False
    succeeded: Callable[[], None] | None = None  # called once every rank has answered, and none with an exception

    @property
    def expected(self) -> int:
        return 1 if self.adverb == "choose" else len(self.ranks)

    @property
    def complete(self) -> bool:
        return len(self.answered) >= self.expected

    def reply(self, reply: Reply, references: Adopted) -> Answer | None:
        """Takes one reply in; the answer, if there is one to send now."""
        position = reply.rank if reply.rank is not None else 0
        if self.over or position in self.answered:
            return None  # an endpoint with an explicit port may send more than one
        self.answered[position] = reply
        if references.objects:
            self.objects[position] = references
        if reply.exception:
            self.failed.add(position)
        if self.adverb == "stream":
            self.over = self.complete
            if reply.exception:
                failed = Failed(call=self.call, rank=position, failure=self._failure([position]))
                return Answer(failed, (reply.data,), last=self.over)
            return Answer(Item(call=self.call, rank=position, objects=references), (reply.data,), last=self.over)
        return self.finish() if self.complete else None

    def finish(self) -> Answer:
        """The answer with what is known now: all values, or the failures so far."""
        self.over = True
        if self.failed:
            return self._failures()
        positions = sorted(self.answered)
        if self.objects or self.adverb == "choose":
            header = Values(
                call=self.call,
                ranks=tuple(positions) if self.adverb == "choose" else None,
                objects={place: self.objects[at] for place, at in enumerate(positions) if at in self.objects},
            )
        else:
            header = numbered(_PLAIN_VALUES, self.call)
        if self.succeeded is not None and self.complete:
            self.succeeded()
        return Answer(header, tuple(self.answered[position].data for position in positions))

    def died(self, dead: Mapping[int, str]) -> Answer | None:
        """``dead``: base rank to report. The answer if a rank that has not answered is among them."""
        if self.over or not dead:
            return None
        lost = [at for at, rank in enumerate(self.ranks) if rank in dead and at not in self.answered]
        if not lost or (self.adverb == "choose" and len(lost) < len(self.ranks)):
            return None
        self.over = True
        named = lost[:MAX_RANKS_NAMED]
        failure = Failure(
            kind="supervision",
            message=dead[self.ranks[lost[0]]],
            mesh=self.mesh,
            ranks=tuple(named),
            hosts={at: self.host_of.get(self.ranks[at], "") for at in named},
            total=len(self.ranks),
            unanswered=self.expected - len(self.answered),
        )
        return Answer(Failed(call=self.call, failure=failure))

    def fail(self, failure: Failure) -> Answer | None:
        """The call ends with ``failure``, unless it is over."""
        if self.over:
            return None
        self.over = True
        return Answer(Failed(call=self.call, failure=failure))

    def _failures(self) -> Answer:
        groups: dict[bytes, list[int]] = {}
        for position in sorted(self.failed):
            digest = hashlib.blake2b(self.answered[position].data, digest_size=16).digest()
            groups.setdefault(digest, []).append(position)
        ordered = sorted(groups.values(), key=len, reverse=True)
        sent, rest = ordered[:MAX_DISTINCT_ERRORS], ordered[MAX_DISTINCT_ERRORS:]
        errors = [_group(ranks, buffer) for buffer, ranks in enumerate(sent)]
        if rest:
            errors.append(_group(sorted(position for ranks in rest for position in ranks), None))
        failure = self._failure(sorted(self.failed)).model_copy(update={"errors": tuple(errors)})
        buffers = tuple(self.answered[ranks[0]].data for ranks in sent)
        return Answer(Failed(call=self.call, failure=failure), buffers)

    def _failure(self, positions: Sequence[int]) -> Failure:
        named = positions[:MAX_RANKS_NAMED]
        return Failure(
            kind="actor",
            message=f"Actor call {self.mesh}.{self.endpoint} failed.",
            mesh=self.mesh,
            ranks=tuple(named),
            hosts={at: self.host_of.get(self.ranks[at], "") for at in named if at < len(self.ranks)},
            errors=(_group(positions, 0),),
            total=len(self.ranks),
            unanswered=self.expected - len(self.answered),
        )


def _group(positions: Sequence[int], buffer: int | None) -> ErrorGroup:
    return ErrorGroup(ranks=tuple(positions[:MAX_RANKS_NAMED]), count=len(positions), buffer=buffer)
