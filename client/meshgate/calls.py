"""Calls that wait for their answers: what each kind of call expects, and which futures its answers settle.

The messages arrive on the connection thread and are only sorted here; values and errors are unpickled by whoever
looks at the future, through a :class:`Reader`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from meshgate.errors import MeshgateError
from meshgate.future import FutureProxy
from meshgate.shape import Shape
from meshgate.value_mesh import ValueMesh
from meshgate_wire import Fragments
from meshgate_wire.messages import Adopted, Failed, Failure, Item, Values

__all__ = ["Acknowledgement", "Answer", "Calls", "Gathering", "Reader", "Single", "Stream"]

_NOTHING = Adopted()


class Reader(Protocol):
    """Turns what arrived into values and errors, in the thread of whoever wants them."""

    def value(self, buffer: Fragments, objects: Adopted, endpoint: str) -> Any:
        """The object in ``buffer``; ``objects`` are the meshes in it. Raises MeshgateError, which names ``endpoint``,
        where it cannot be read."""

    def error(self, failure: Failure, buffers: Sequence[Fragments], endpoint: str) -> MeshgateError:
        """The error that ``failure`` tells of."""


class Answer(ABC):
    """What one call waits for. ``target``: the object called; ``endpoint``: what was called, for people."""

    def __init__(self, target: int, endpoint: str) -> None:
        self.target = target
        self.endpoint = endpoint

    @abstractmethod
    def pending(self) -> Sequence[FutureProxy[Any]]:
        """The futures that this call settles."""

    @abstractmethod
    def settle(self, read: Callable[[], Any]) -> None:
        """Settles every future that is still open."""

    def values(self, reader: Reader, header: Values, buffers: Sequence[Fragments]) -> None:
        """The values have come, and the call is over."""
        raise NotImplementedError(f"values came for {self.endpoint}, which expects none")

    def item(self, reader: Reader, header: Item, buffers: Sequence[Fragments]) -> bool:
        """One value of a stream has come; whether that was the last."""
        raise NotImplementedError(f"an item came for {self.endpoint}, which is no stream")

    def failed(self, reader: Reader, header: Failed, buffers: Sequence[Fragments]) -> bool:
        """A failure has come; whether the call is over."""
        self.settle(_raising(lambda: reader.error(header.failure, buffers, self.endpoint)))
        return True

    def fail(self, make_error: Callable[[], MeshgateError]) -> None:
        """The call cannot be answered any more."""
        self.settle(_raising(make_error))


def _raising(make_error: Callable[[], MeshgateError]) -> Callable[[], Any]:
    def read() -> Any:
        raise make_error()

    return read


class Single(Answer):
    """One value: ``call_one``, ``choose``."""

    def __init__(self, target: int, endpoint: str) -> None:
        super().__init__(target, endpoint)
        self.future: FutureProxy[Any] = FutureProxy()

    def pending(self) -> Sequence[FutureProxy[Any]]:
        return (self.future,)

    def settle(self, read: Callable[[], Any]) -> None:
        self.future.settle(read)

    def values(self, reader: Reader, header: Values, buffers: Sequence[Fragments]) -> None:
        buffer, objects = buffers[0], header.objects.get(0, _NOTHING)
        self.settle(lambda: reader.value(buffer, objects, self.endpoint))


class Gathering(Answer):
    """One value a rank: ``call``."""

    def __init__(self, target: int, endpoint: str, shape: Shape) -> None:
        super().__init__(target, endpoint)
        self.future: FutureProxy[ValueMesh[Any]] = FutureProxy()
        self._shape = shape

    def pending(self) -> Sequence[FutureProxy[Any]]:
        return (self.future,)

    def settle(self, read: Callable[[], Any]) -> None:
        self.future.settle(read)

    def values(self, reader: Reader, header: Values, buffers: Sequence[Fragments]) -> None:
        objects = header.objects

        def reading(rank: int, buffer: Fragments) -> Callable[[], Any]:
            return lambda: reader.value(buffer, objects.get(rank, _NOTHING), self.endpoint)

        self.settle(lambda: ValueMesh.lazy(self._shape, [reading(rank, buffer) for rank, buffer in enumerate(buffers)]))


class Stream(Answer):
    """One future a rank, settled in the order in which the ranks answer."""

    def __init__(self, target: int, endpoint: str, size: int) -> None:
        super().__init__(target, endpoint)
        self.futures: list[FutureProxy[Any]] = [FutureProxy() for _ in range(size)]
        self._answered = 0

    def pending(self) -> Sequence[FutureProxy[Any]]:
        return self.futures

    def settle(self, read: Callable[[], Any]) -> None:
        for future in self.futures[self._answered :]:
            future.settle(read)
        self._answered = len(self.futures)

    def item(self, reader: Reader, header: Item, buffers: Sequence[Fragments]) -> bool:
        buffer = buffers[0]
        return self._settle_next(lambda: reader.value(buffer, header.objects, self.endpoint))

    def failed(self, reader: Reader, header: Failed, buffers: Sequence[Fragments]) -> bool:
        if header.rank is None:
            return super().failed(reader, header, buffers)
        return self._settle_next(_raising(lambda: reader.error(header.failure, buffers, self.endpoint)))

    def _settle_next(self, read: Callable[[], Any]) -> bool:
        self.futures[self._answered].settle(read)
        self._answered += 1
        return self._answered == len(self.futures)


class Acknowledgement(Answer):
    """That something was done: ``stop()``, ``initialized``. The future's value is ``value``."""

    def __init__(self, target: int, endpoint: str, value: Any = None) -> None:
        super().__init__(target, endpoint)
        self.future: FutureProxy[Any] = FutureProxy()
        self._value = value

    def pending(self) -> Sequence[FutureProxy[Any]]:
        return (self.future,)

    def settle(self, read: Callable[[], Any]) -> None:
        self.future.settle(read)

    def done(self) -> None:
        self.settle(lambda: self._value)


class Calls:
    """The calls under way, by number. Numbers are never reused."""

    def __init__(self) -> None:
        self._waiting: dict[int, Answer] = {}
        self._numbers: Iterator[int] = itertools.count(1)

    def __len__(self) -> int:
        return len(self._waiting)

    def number(self) -> int:
        """A number for a call that waits for no answer."""
        return next(self._numbers)

    def add(self, answer: Answer) -> int:
        number = next(self._numbers)
        self._waiting[number] = answer
        return number

    def get(self, number: int) -> Answer | None:
        return self._waiting.get(number)

    def end(self, number: int) -> Answer | None:
        """The call is over, or was never sent."""
        return self._waiting.pop(number, None)

    def end_where(self, concerned: Callable[[Answer], bool]) -> list[Answer]:
        """Takes out the calls that are ``concerned``."""
        ended = [number for number, answer in list(self._waiting.items()) if concerned(answer)]
        return [answer for number in ended if (answer := self._waiting.pop(number, None)) is not None]
