"""Calls that wait for replies: what each kind of call expects, and which futures the replies settle.

Replies arrive on the connection thread, which only routes them. The observer of a future unpickles the value or the
error, through a ``Reader``.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from meshgate.errors import SpawnFailed
from meshgate.session.errors.unread import FailedCall, UnreadFailures
from meshgate.session.futures import FutureProxy
from meshgate.shapes.shape import Shape
from meshgate.shapes.value_mesh import ValueMesh
from meshgate_wire import Fragments, Header
from meshgate_wire.messages import Adopted, CallProgress, Failed, Failure, Item, Values, waiting_ranks

_NOTHING = Adopted()


class Reader(Protocol):
    """Unpickles values and errors, in the observer's thread."""

    def value(self, buffer: Fragments, objects: Adopted, endpoint: str) -> Any:
        """The object in ``buffer``; ``objects`` are the meshes it refers to.

        Raises UnreadableResult, which names ``endpoint``, if it cannot be unpickled.
        """

    def error(self, failure: Failure, buffers: Sequence[Fragments], endpoint: str) -> Exception:
        """The error to raise for ``failure``."""


class Canceller(Protocol):
    """Cancels calls of a session. ``detached``: the name of a detached session, or empty."""

    detached: str

    def cancel(self, call: PendingCall) -> None: ...


class Follower(Protocol):
    """Observes a call, from its request to its end."""

    def failed(self, reason: str) -> None:
        """The call has failed; ``end`` follows."""

    def end(self) -> None: ...


class PendingCall(ABC):
    """A call without its reply. ``target`` is the object called, ``endpoint`` names the call in error messages."""

    def __init__(self, target: int, endpoint: str) -> None:
        self.target = target
        self.endpoint = endpoint
        self.sent = time.monotonic()
        self.progress: tuple[CallProgress, float] | None = None  # what the gateway reported last, and when
        self.outage: Callable[[], str] = str  # describes how long there has been no connection, and why
        self.about_to_wait: Callable[[], None] = lambda: None
        """Called when the program begins to wait for the call."""
        self.number = 0
        self.header: Header | None = None  # of its request
        self.canceller: Canceller | None = None  # None: it cannot be cancelled
        self._cancelled = False  # the canceller was asked to
        self.unread: UnreadFailures | None = None  # None: an unread failure is not reported
        self._failed_call: FailedCall | None = None
        self._follower: Follower | None = None
        self.unprinted: Callable[[], object] | None = None
        """What waits until the output that arrived before the reply at hand is printed; None: it is."""

    def follow(self, follower: Follower) -> None:
        """Notifies ``follower`` of the call's end: when all its futures are settled."""
        self._follower = follower
        if futures := self.futures():
            futures[-1].when_settled(follower.end)  # the futures of a stream settle in order
        else:
            follower.end()

    def cancel(self, *, interrupted: bool = False) -> bool:
        """Asks the gateway to cancel the call. Returns whether it can be; its outcome shows whether it was.
        ``interrupted``: by Ctrl-C, which the calls of a detached session outlive."""
        if self.canceller is None or (interrupted and self.canceller.detached):
            return False
        if not self._cancelled:  # one message is enough, and it waits for no space in the queue
            self.canceller.cancel(self)
            self._cancelled = True
        return True

    def waits_for(self) -> str:
        """What the call waits for, for people."""
        now = time.monotonic()
        if outage := self.outage():
            return f"{outage}; {self.endpoint} was called {_seconds(now - self.sent)} ago and waits"
        if self.progress is None:
            return f"{self.endpoint} was called {_seconds(now - self.sent)} ago, and the gateway has not reported on it"
        progress, received = self.progress
        return describe_progress(progress, self.endpoint.rpartition(".")[2], progress.age + now - received)

    @abstractmethod
    def futures(self) -> Sequence[FutureProxy[Any]]:
        """The futures that this call settles."""

    @abstractmethod
    def settle(self, read: Callable[[], Any]) -> None:
        """Settles every future that is still open."""

    def values_received(self, reader: Reader, header: Values, buffers: Sequence[Fragments]) -> None:
        """Takes the values of all ranks, which end the call."""
        raise NotImplementedError(f"{self.endpoint} received values, which it does not expect")

    def item_received(self, reader: Reader, header: Item, buffers: Sequence[Fragments]) -> bool:
        """Takes one value of a stream. Returns whether the call is complete."""
        raise NotImplementedError(f"{self.endpoint} received an item, but is not a stream")

    def failure_received(self, reader: Reader, header: Failed, buffers: Sequence[Fragments]) -> bool:
        """Takes a failure. Returns whether the call is complete."""
        self._has_failed(header.failure.message)
        endpoint = self.endpoint  # not this call, which keeps its futures alive
        self._settle_failed(lambda: reader.error(header.failure, buffers, endpoint))
        return True

    def fail(self, make_error: Callable[[], Exception]) -> None:
        """Fails every open future. Each observer's error comes from ``make_error``."""
        if self._follower is not None:
            self._has_failed(str(make_error()))
        self._settle_failed(make_error)

    def _settle_failed(self, make_error: Callable[[], Exception]) -> None:
        self._watch(self.futures(), make_error)
        self.settle(_raising(make_error))

    def _watch(self, futures: Sequence[FutureProxy[Any]], make_error: Callable[[], Exception]) -> None:
        """Has the failure reported if the program does not read it. ``make_error`` must not refer to this call."""
        if self.unread is not None and self.unread.watching and not self.unread.ignored:
            if self._failed_call is None:
                self._failed_call = self.unread.failed_call(self.endpoint)
            self._failed_call.watch(futures, make_error)

    def _after_output(self, read: Callable[[], Any]) -> Callable[[], Any]:
        """``read``, once the output that arrived before the reply is printed."""
        unprinted = self.unprinted
        if unprinted is None:
            return read

        def read_after_output() -> Any:
            unprinted()
            return read()

        return read_after_output

    def _has_failed(self, reason: str) -> None:
        if self._follower is not None:
            self._follower.failed(reason)


def describe_progress(progress: CallProgress, endpoint: str, age: float) -> str:
    """``3 of 4 ranks answered; rank 1 on workers-0 has run train_step for 31 s``"""
    missing = progress.total - progress.answered
    chosen = len(progress.waiting) > missing  # ``choose``: any of the ranks
    text = "the chosen rank" if chosen else waiting_ranks(progress.waiting, missing)
    has = "has" if missing == 1 else "have"
    state = f"{has} run {endpoint} for" if progress.first else f"{has} other calls before {endpoint}, and it has waited"
    also = ", or the constructor before it" if progress.first and progress.untried else ""
    return f"{progress.answered} of {progress.total} ranks answered; {text} {state} {_seconds(age)}{also}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def _raising(make_error: Callable[[], Exception]) -> Callable[[], Any]:
    def read() -> Any:
        raise make_error()

    return read


class PendingValue(PendingCall):
    """Expects one value: ``call_one``, ``choose``."""

    def __init__(self, target: int, endpoint: str) -> None:
        super().__init__(target, endpoint)
        self.future: FutureProxy[Any] = FutureProxy(call=self)

    def futures(self) -> Sequence[FutureProxy[Any]]:
        return (self.future,)

    def settle(self, read: Callable[[], Any]) -> None:
        self.future.settle(self._after_output(read))

    def values_received(self, reader: Reader, header: Values, buffers: Sequence[Fragments]) -> None:
        buffer, objects = buffers[0], header.objects.get(0, _NOTHING)
        endpoint = self.endpoint  # not this call, which keeps its future alive

        def read() -> Any:
            return reader.value(buffer, objects, endpoint)

        self.future.settle(read if self.unprinted is None else self._after_output(read))


class PendingValueMesh(PendingCall):
    """Expects a value from each rank: ``call``."""

    def __init__(self, target: int, endpoint: str, shape: Shape) -> None:
        super().__init__(target, endpoint)
        self.future: FutureProxy[ValueMesh[Any]] = FutureProxy(call=self)
        self._shape = shape

    def futures(self) -> Sequence[FutureProxy[Any]]:
        return (self.future,)

    def settle(self, read: Callable[[], Any]) -> None:
        self.future.settle(self._after_output(read))

    def values_received(self, reader: Reader, header: Values, buffers: Sequence[Fragments]) -> None:
        objects, shape = header.objects, self._shape
        endpoint = self.endpoint  # not this call, which keeps its future alive

        def reading(rank: int, buffer: Fragments) -> Callable[[], Any]:
            return lambda: reader.value(buffer, objects.get(rank, _NOTHING), endpoint)

        def read() -> ValueMesh[Any]:
            return ValueMesh.lazy(shape, [reading(rank, buffer) for rank, buffer in enumerate(buffers)])

        self.future.settle(read if self.unprinted is None else self._after_output(read))


class PendingStream(PendingCall):
    """Expects a reply from each rank and settles one future for each, in the order of arrival: ``stream``."""

    def __init__(self, target: int, endpoint: str, size: int) -> None:
        super().__init__(target, endpoint)
        self._futures: list[FutureProxy[Any]] = [FutureProxy(call=self) for _ in range(size)]
        self._settled = 0

    def futures(self) -> list[FutureProxy[Any]]:
        return self._futures

    def settle(self, read: Callable[[], Any]) -> None:
        for future in self._futures[self._settled :]:
            future.settle(self._after_output(read))
        self._settled = len(self._futures)

    def item_received(self, reader: Reader, header: Item, buffers: Sequence[Fragments]) -> bool:
        buffer, endpoint = buffers[0], self.endpoint  # not this call, which keeps its futures alive
        return self._settle_next(lambda: reader.value(buffer, header.objects, endpoint))

    def failure_received(self, reader: Reader, header: Failed, buffers: Sequence[Fragments]) -> bool:
        if header.rank is None:
            return super().failure_received(reader, header, buffers)
        self._has_failed(header.failure.message)
        endpoint = self.endpoint  # not this call, which keeps its futures alive

        def make_error() -> Exception:
            return reader.error(header.failure, buffers, endpoint)

        self._watch(self._futures[self._settled : self._settled + 1], make_error)
        return self._settle_next(_raising(make_error))

    def _settle_failed(self, make_error: Callable[[], Exception]) -> None:
        self._watch(self._futures[self._settled :], make_error)
        self.settle(_raising(make_error))

    def _settle_next(self, read: Callable[[], Any]) -> bool:
        self._futures[self._settled].settle(self._after_output(read))
        self._settled += 1
        return self._settled == len(self._futures)


class PendingAck(PendingCall):
    """Expects an acknowledgement: ``stop()``, ``initialized``. The future's value is ``value``."""

    def __init__(
        self,
        target: int,
        endpoint: str,
        value: Any = None,
        *,
        acknowledged: Callable[[int], object] | None = None,
        ends: bool = False,
    ) -> None:
        """``acknowledged`` is called with the number, on the connection thread, before the future is settled. ``ends``:
        it has nothing to do if the target died before it was up."""
        super().__init__(target, endpoint)
        self.future: FutureProxy[Any] = FutureProxy(call=self)
        self._value, self._acknowledged, self._ends = value, acknowledged, ends

    def futures(self) -> Sequence[FutureProxy[Any]]:
        return (self.future,)

    def settle(self, read: Callable[[], Any]) -> None:
        self.future.settle(read)

    def fail(self, make_error: Callable[[], Exception]) -> None:
        if self._ends and isinstance(make_error(), SpawnFailed):
            self.done_received()
        else:
            super().fail(make_error)

    def done_received(self) -> None:
        if self._acknowledged is not None:
            self._acknowledged(self.number)
        value = self._value  # not this call, which keeps its future alive
        self.settle(lambda: value)


class PendingCalls:
    """The table of pending calls, by number. Numbers are never reused."""

    def __init__(self, outage: Callable[[], str] = str, about_to_wait: Callable[[], None] = lambda: None) -> None:
        """``outage`` and ``about_to_wait`` are those of each call."""
        self._calls: dict[int, PendingCall] = {}
        self.get = self._calls.get  # every reply asks for its call
        self._outage, self._about_to_wait = outage, about_to_wait
        self._numbers: Iterator[int] = itertools.count(1)

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[PendingCall]:
        return iter(list(self._calls.values()))

    def items(self) -> list[tuple[int, PendingCall]]:
        return list(self._calls.items())

    def next_number(self) -> int:
        """A number for a call that expects no reply."""
        return next(self._numbers)

    def add(self, call: PendingCall) -> int:
        """Adds ``call`` and returns its number."""
        call.number = number = next(self._numbers)
        call.outage, call.about_to_wait = self._outage, self._about_to_wait
        self._calls[number] = call
        return number

    def restore(self, number: int, call: PendingCall) -> None:
        """Adds a call that an earlier holder of the session made."""
        call.number = number
        call.outage, call.about_to_wait = self._outage, self._about_to_wait
        self._calls[number] = call

    def continue_at(self, number: int) -> None:
        """The next call has this number."""
        self._numbers = itertools.count(number)

    def pop(self, number: int) -> PendingCall | None:
        """Removes the call, which is complete or was never sent."""
        return self._calls.pop(number, None)

    def pop_where(self, condition: Callable[[PendingCall], bool]) -> list[PendingCall]:
        """Removes and returns the calls for which ``condition`` is true."""
        numbers = [number for number, call in list(self._calls.items()) if condition(call)]
        return [call for number in numbers if (call := self._calls.pop(number, None)) is not None]
