"""Endpoints of spawned actors: the ways to call them, and what builds on these."""

from __future__ import annotations

import functools
import pickle
import reprlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, ParamSpec, TypeVar, cast

from meshgate.actors import api
from meshgate.actors.actor_class import EndpointSpec
from meshgate.actors.telemetry import NO_SPAN, TRACE_MODULE, CallSpan, start_span
from meshgate.errors import InvalidRequestError, UnpicklableArgument
from meshgate.monarch_classes import monarch_api
from meshgate.proxies.kept import KeptMesh, keep_results, use_in_call
from meshgate.proxies.mesh import MeshProxy
from meshgate.proxies.ports import Port
from meshgate.serialization.pickling import Pickled, dumps_call
from meshgate.serialization.stale_source import restart_hint
from meshgate.session.detached import current_tag
from meshgate.session.futures import FutureProxy
from meshgate.session.pending_calls import PendingCall, PendingStream, PendingValue, PendingValueMesh
from meshgate.shapes.value_mesh import ValueMesh
from meshgate.suggestions import wrong_arguments
from meshgate_wire.message_codec import with_call_number
from meshgate_wire.messages import Call, SendTo

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
Selection = Literal["all", "choose"]
MOST_ARGUMENTS = 80  # characters of the arguments in an error
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
Adverb = Literal["call", "call_one", "choose", "stream", "broadcast"]


class EndpointProxy(Generic[P, R]):
    """One endpoint of a mesh of actors.

    Every way to call it pickles the arguments and returns at once; the arguments may be changed afterwards. Raises
    ``TypeError`` if they do not fit the endpoint, and ``UnpicklableArgument`` if they cannot be pickled.
    """

    __slots__ = ("_Class", "_headers", "_is_users", "_label", "_mesh", "_shape", "_spec", "_target")

    def __init__(self, mesh: MeshProxy, spec: EndpointSpec, Class: type) -> None:
        self._mesh = mesh
        self._spec = spec
        self._Class = Class
        self._is_users = not Class.__module__.startswith("meshgate.")  # others are called by this package itself
        self._target = mesh._object
        self._shape = mesh._shape
        self._headers: dict[Adverb, Call] = {}  # for arguments without proxies: only the number changes
        self._label = f"{mesh._name}.{spec.name}"

    def call(self, *args: P.args, **kwargs: P.kwargs) -> FutureProxy[ValueMesh[R]]:
        """Calls every actor; the result has a value for each rank."""
        call = PendingValueMesh(self._target, self._label, self._shape)
        self._request("call", call, args, kwargs)
        return call.future

    def call_one(self, *args: P.args, **kwargs: P.kwargs) -> FutureProxy[R]:
        """Calls the only actor of the mesh. Raises ``ValueError`` if there are more."""
        if len(self._shape) != 1:
            raise ValueError(
                f"call_one requires exactly 1 actor, but mesh has {len(self._shape)}: select one with "
                f"{self._mesh._example('slice')}, or use call() for all or choose() for any of them"
            )
        call = PendingValue(self._target, self._label)
        self._request("call_one", call, args, kwargs)
        return call.future

    def choose(self, *args: P.args, **kwargs: P.kwargs) -> FutureProxy[R]:
        """Calls one actor, chosen at random."""
        call = PendingValue(self._target, self._label)
        self._request("choose", call, args, kwargs)
        return call.future

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[FutureProxy[R]]:
        """Calls every actor; yields one future for each, in the order in which they reply."""
        call = PendingStream(self._target, self._label, len(self._shape))
        self._request("stream", call, args, kwargs)
        return iter(call.futures())

    def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Calls every actor without waiting; failures are reported to ``unhandled_fault_hook``."""
        mesh = self._mesh
        pickled = self._pickle(args, kwargs, answered=False)
        mesh._client.require_usable(self._target, self._label)
        span = start_span(self._label, "broadcast", self._shape)
        header = self._header("broadcast", pickled, span, mesh._client.calls.next_number())
        with span or NO_SPAN:
            mesh._client.post(header, (pickled.data, *pickled.buffers), stream=mesh._stream)
        if span is not None:
            span.end()

    def keep(self, *args: P.args, **kwargs: P.kwargs) -> KeptMesh[R]:
        """Calls every actor; the results stay in their processes, and later calls can take them as arguments.

        A failure of the call is the error of what uses the results.
        """
        label = f"{self._label}.keep()"
        call = PendingValueMesh(self._target, label, self._shape)
        kept = keep_results(self._mesh, label, call)
        self._request("call", call, args, kwargs, keep=kept._remote.number)
        return kept

    def rref(self, *args: P.args, **kwargs: P.kwargs) -> NoReturn:
        """Not available: distributed tensors need a driver next to the processes."""
        raise InvalidRequestError(
            f"{self._label}.rref() is not available through a gateway: use keep(), or submit the program to the "
            "job and use meshgate.native_hosts() in it"
        )

    def _request(
        self, adverb: Adverb, call: PendingCall, args: tuple[Any, ...], kwargs: dict[str, Any], *, keep: int = 0
    ) -> None:
        pickled = self._pickle(args, kwargs)
        mesh, client, span = self._mesh, self._mesh._owned.session, None
        if self._is_users:
            call.unread = client.unread
            call.canceller = None if keep else client
        if TRACE_MODULE in sys.modules:
            span = start_span(self._label, adverb, self._shape)
            if span is not None:
                call.follow(span)
        make_header: Callable[[int], Call]
        if adverb in self._headers and not pickled.arguments and span is None and not current_tag() and not keep:
            make_header = functools.partial(with_call_number, self._headers[adverb])
        elif keep:
            client.require_usable(self._target, self._label)
            make_header = functools.partial(self._keeping_header, pickled, span, keep)
        else:
            make_header = functools.partial(self._header, adverb, pickled, span)
        with span or NO_SPAN:
            client.request(call, make_header, (pickled.data, *pickled.buffers), stream=mesh._stream)

    def _pickle(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, answered: bool = True) -> Pickled:
        spec = self._spec
        if kwargs or len(args) not in spec.valid_counts:
            try:
                spec.check(args, kwargs)
            except TypeError as error:
                text = wrong_arguments(error, spec.signature, kwargs, spec.placeholders)
                raise TypeError(f"{self._label}(): {text}{restart_hint(self._Class)}") from None
        if not kwargs and _PLAIN.issuperset(map(type, args)):
            return Pickled(pickle.dumps((args, kwargs), 5))  # contains no proxies and no code
        client = self._mesh._client
        pickled = dumps_call(
            args,
            kwargs,
            client.resolve,
            called=self._label,
            parameters=spec.parameters,
            worker_python=client.worker_python,
        )
        if pickled.arguments:
            stream = self._mesh._stream
            use_in_call(client, pickled.arguments, self._shape, self._label, stream, answered=answered)
        return pickled

    def _keeping_header(self, pickled: Pickled, span: CallSpan | None, keep: int, number: int) -> Call:
        return self._header("call", pickled, span, number).model_copy(update={"keep": keep})

    def _header(self, adverb: Adverb, pickled: Pickled, span: CallSpan | None, number: int) -> Call:
        tag, trace = current_tag(), {} if span is None else span.carrier
        cached = self._headers.get(adverb)
        if cached is not None and not pickled.arguments:
            varied = cached.model_copy(update={"tag": tag, "trace": trace}) if tag or trace else cached
            return with_call_number(varied, number)
        header = Call(
            call=number,
            target=self._mesh._ref,
            endpoint=self._spec.name,
            adverb=adverb,
            explicit_port=self._spec.explicit_response_port,
            arguments=pickled.arguments,
            tag=tag,
            trace=trace,
        )
        if not pickled.arguments and not tag and not trace:
            self._headers[adverb] = header
        return header

    def _send(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], port: Port[Any] | None, selection: Selection
    ) -> None:
        """Implements ``meshgate.send``: replies go to ``port``, or are dropped."""
        if port is None:
            if selection == "all":
                self.broadcast(*args, **kwargs)
            else:
                self.choose(*args, **kwargs)
            return
        if not isinstance(port, Port):
            raise InvalidRequestError(
                f"send() cannot use the port {port!r}, which belongs to a Monarch on this machine. Nothing was sent. "
                "Import Channel from meshgate instead of monarch.actor"
            )
        mesh, client = self._mesh, self._mesh._client
        pickled = self._pickle(args, kwargs, answered=False)
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

    if not TYPE_CHECKING:  # which reports these mistakes itself

        def __call__(self, *args, **kwargs):
            given = [*map(reprlib.repr, args), *(f"{name}={reprlib.repr(value)}" for name, value in kwargs.items())]
            text = ", ".join(given) if sum(map(len, given)) < MOST_ARGUMENTS else "..."
            raise TypeError(
                f"{self._label} runs in the actors' processes: use .call({text}) (every rank), .call_one({text}) (a "
                f"mesh of one), .choose({text}) (any rank), .stream({text}) (every rank, each with a future of its "
                f"own), .broadcast({text}) (every rank, without results) or .keep({text}) (every rank, whose results "
                "stay there)"
            )

        def __getattr__(self, attr):
            if attr.startswith("_"):
                raise AttributeError(attr)
            raise AttributeError(
                f"{self._label} has no attribute {attr!r}: an endpoint is called with .call(), .call_one(), .choose(), "
                ".stream(), .broadcast() or .keep()",
                name=attr,
            )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnpicklableArgument(
            f"{self!r} cannot be pickled, as in Monarch: pass the actor mesh, and call its endpoint there"
        )

    def __repr__(self) -> str:
        return f"<endpoint {self._label} of {self._mesh!r}>"


def send(
    endpoint: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    port: Port[Any] | None = None,
    selection: Selection = "all",
) -> None:
    """Calls ``endpoint`` with every reply sent to ``port`` (None: dropped). ``selection``: "all" or "choose"."""
    if _is_monarchs(endpoint):
        monarchs_send: Any = monarch_api()["send"]
        monarchs_send(endpoint, args, kwargs, port, selection)
        return
    if not isinstance(endpoint, EndpointProxy):
        raise TypeError(f"send() needs an endpoint of a spawned actor, not {type(endpoint).__name__}")
    if selection not in ("all", "choose"):
        raise ValueError(f"invalid selection {selection!r}: expected 'all' or 'choose'")
    endpoint._send(args, kwargs, port, selection)


def _is_monarchs(endpoint: object) -> bool:
    """Whether it is an endpoint of Monarch's own, which an actor has and the driver has not."""
    return api.inside_actor() and not isinstance(endpoint, EndpointProxy)


class Accumulator(Generic[P, R, A]):
    """Folds the replies of all actors into one value: ``Accumulator(actors.count, 0, operator.add)``."""

    def __init__(self, endpoint: EndpointProxy[P, R], identity: A, combine: Callable[[A, R], A]) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._combine = combine

    def accumulate(self, *args: P.args, **kwargs: P.kwargs) -> FutureProxy[A]:
        """Calls the endpoint on every actor and folds the replies in the order of arrival.

        The fold runs in the thread of the future's first observer. The future fails with the first reply that fails.
        """
        if _is_monarchs(self._endpoint):
            monarchs: Any = monarch_api()["Accumulator"]
            accumulator = monarchs(self._endpoint, self._identity, self._combine)
            return cast("FutureProxy[A]", accumulator.accumulate(*args, **kwargs))
        results = list(self._endpoint.stream(*args, **kwargs))
        if not results:
            return FutureProxy.resolved(self._identity)

        def fold() -> A:
            value = self._identity
            for result in results:
                value = self._combine(value, result.get())
            return value

        folded: FutureProxy[A] = FutureProxy()
        # A stream's futures settle in order, and all at once if the call fails, so the last one ends the wait.
        results[-1].when_settled(lambda: folded.settle(fold))
        return folded
