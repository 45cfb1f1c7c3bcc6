"""Endpoints of spawned actors: the five ways to call them, and what is built on these."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, ParamSpec, TypeVar

from meshgate.actors import EndpointSpec
from meshgate.calls import Answer, Gathering, Single, Stream
from meshgate.errors import InvalidRequestError
from meshgate.future import FutureProxy
from meshgate.old_code import advice
from meshgate.pickling import Pickled, dumps_call
from meshgate.value_mesh import ValueMesh
from meshgate_wire.messages import Call, SendTo, numbered

if TYPE_CHECKING:
    from meshgate.channel import Port
    from meshgate.proxies.actors import ActorMeshProxy

__all__ = ["Accumulator", "EndpointProxy", "Selection", "send"]

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
Selection = Literal["all", "choose"]
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
Adverb = Literal["call", "call_one", "choose", "stream", "broadcast"]


class EndpointProxy(Generic[P, R]):
    """One endpoint of a mesh of actors.

    Every way to call it returns at once; arguments are pickled before it does, so they may be changed afterwards.
    ``TypeError`` where they do not fit the endpoint, ``UnpicklableArgument`` where they cannot travel.
    """

    __slots__ = ("_headers", "_label", "_mesh", "_shape", "_spec", "_target")

    def __init__(self, mesh: ActorMeshProxy, spec: EndpointSpec) -> None:
        self._mesh = mesh
        self._spec = spec
        self._target = mesh._object
        self._shape = mesh._shape
        self._headers: dict[Adverb, Call] = {}  # of calls whose arguments hold no proxies: they differ in the number
        self._label = f"{mesh._mesh_name}.{spec.name}"

    def call(self, *args: P.args, **kwargs: P.kwargs) -> FutureProxy[ValueMesh[R]]:
        """Calls every actor; a value a rank."""
        answer = Gathering(self._target, self._label, self._shape)
        self._ask("call", answer, args, kwargs)
        return answer.future

    def call_one(self, *args: P.args, **kwargs: P.kwargs) -> FutureProxy[R]:
        """Calls the only actor of the mesh. ``ValueError`` where there are more."""
        if len(self._shape) != 1:
            raise ValueError(f"call_one requires exactly 1 actor, but mesh has {len(self._shape)}")
        answer = Single(self._target, self._label)
        self._ask("call_one", answer, args, kwargs)
        return answer.future

    def choose(self, *args: P.args, **kwargs: P.kwargs) -> FutureProxy[R]:
        """Calls one actor, chosen at random."""
        answer = Single(self._target, self._label)
        self._ask("choose", answer, args, kwargs)
        return answer.future

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[FutureProxy[R]]:
        """Calls every actor; one future an actor, in the order in which they answer."""
        answer = Stream(self._target, self._label, len(self._shape))
        self._ask("stream", answer, args, kwargs)
        return iter(answer.futures)

    def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Calls every actor and waits for nothing; failures go to ``unhandled_fault_hook``."""
        mesh = self._mesh
        pickled = self._pickle(args, kwargs)
        mesh._client.require_usable(self._target, self._label)
        header = self._header(mesh._client.calls.number(), "broadcast", pickled)
        mesh._client.post(header, (pickled.data, *pickled.buffers), stream=mesh._stream)

    def rref(self, *args: P.args, **kwargs: P.kwargs) -> NoReturn:
        """Distributed tensors need the driver next to the processes."""
        raise InvalidRequestError(
            f"{self._label}.rref() is not available through a gateway: use call(), and keep tensors in the actors"
        )

    def _ask(self, adverb: Adverb, answer: Answer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        pickled = self._pickle(args, kwargs)
        mesh = self._mesh
        mesh._client.ask(
            answer,
            lambda call: self._header(call, adverb, pickled),
            (pickled.data, *pickled.buffers),
            stream=mesh._stream,
        )

    def _pickle(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pickled:
        try:
            self._spec.check(args, kwargs)
        except TypeError as error:
            raise TypeError(f"{error}{advice(self._mesh._class)}") from None
        if not kwargs and all(type(value) in _PLAIN for value in args):
            return Pickled(pickle.dumps((args, kwargs), 5))  # nothing in it that needs looking at
        client = self._mesh._client
        pickled = dumps_call(args, kwargs, client.resolve, called=self._label, parameters=self._spec.parameters)
        client.require_same_python(pickled.code)
        return pickled

    def _header(self, call: int, adverb: Adverb, pickled: Pickled) -> Call:
        known = self._headers.get(adverb)
        if known is not None and not pickled.arguments:
            return numbered(known, call)
        header = Call(
            call=call,
            target=self._mesh._ref,
            endpoint=self._spec.name,
            adverb=adverb,
            explicit_port=self._spec.explicit_response_port,
            arguments=pickled.arguments,
        )
        if not pickled.arguments:
            self._headers[adverb] = header
        return header

    def _send(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], port: Port[Any] | None, selection: Selection
    ) -> None:
        """``meshgate.send``: the answers go to ``port``, or nowhere."""
        if port is None:
            if selection == "all":
                self.broadcast(*args, **kwargs)
            else:
                self.choose(*args, **kwargs)
            return
        mesh, client = self._mesh, self._mesh._client
        pickled = self._pickle(args, kwargs)
        client.require_usable(self._target, self._label)
        header = SendTo(
            target=mesh._ref,
            endpoint=self._spec.name,
            selection=selection,
            explicit_port=self._spec.explicit_response_port,
            port=port._as_argument(client).ref.object,
            arguments=pickled.arguments,
        )
        client.post(header, (pickled.data, *pickled.buffers), stream=mesh._stream)

    def __repr__(self) -> str:
        return f"<endpoint {self._label} of {self._mesh!r}>"


def send(
    endpoint: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    port: Port[Any] | None = None,
    selection: Selection = "all",
) -> None:
    """Calls ``endpoint`` and has every answer sent to ``port`` (None: dropped). ``selection``: "all" or "choose"."""
    if not isinstance(endpoint, EndpointProxy):
        raise TypeError(f"send() needs an endpoint of a spawned actor, not {type(endpoint).__name__}")
    if selection not in ("all", "choose"):
        raise ValueError(f"selection is {selection!r}: expected 'all' or 'choose'")
    endpoint._send(args, kwargs, port, selection)


class Accumulator(Generic[P, R, A]):
    """Folds the answers of all actors into one value: ``Accumulator(actors.count, 0, operator.add)``."""

    def __init__(self, endpoint: EndpointProxy[P, R], identity: A, combine: Callable[[A, R], A]) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._combine = combine

    def accumulate(self, *args: P.args, **kwargs: P.kwargs) -> FutureProxy[A]:
        """Calls the endpoint on every actor. The fold runs in the thread that first looks at the result, in the
        order in which the actors answered; the first failure among them is the future's."""
        results = list(self._endpoint.stream(*args, **kwargs))

        def fold() -> A:
            value = self._identity
            for result in results:
                value = self._combine(value, result.get())
            return value

        folded: FutureProxy[A] = FutureProxy()
        # A stream's futures are settled in order, and all at once where the call fails: the last one ends the wait.
        results[-1].when_settled(lambda: folded.settle(fold))
        return folded
