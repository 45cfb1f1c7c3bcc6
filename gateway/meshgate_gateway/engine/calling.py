"""Calls go to the actors, and what they answer goes to the laptop, as ``calls.Pending`` says.

A call whose object is there is sent to the actors in the callback that received it: no task, no queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from meshgate_gateway.engine.calls import GATHER_FAILURES, Answer, Pending
from meshgate_gateway.engine.monarch import Binding, told
from meshgate_gateway.engine.objects import Actors, Objects, RequestFailed, cached, invalid, ranks_within
from meshgate_wire import Fragments
from meshgate_wire.messages import Adopted, Argument, Call, Failure, Header, MeshRef, stream_of

CONTROL = 0
_NO_MESHES = Adopted()


class Send(Protocol):
    def __call__(self, header: Header, buffers: Sequence[Any] = (), *, stream: int = CONTROL) -> None: ...


class Calling:
    """The calls of a session.

    ``arguments`` gives Monarch's own objects for what pickled arguments refer to; ``idle`` is called when the last call
    under way has been answered.
    """

    def __init__(
        self,
        objects: Objects,
        binding: Binding,
        arguments: Callable[[Sequence[Argument]], Awaitable[Sequence[Any]]],
        send: Send,
        idle: Callable[[], None],
    ) -> None:
        self._objects, self._binding, self._arguments, self._send, self._idle = objects, binding, arguments, send, idle
        self._loop = asyncio.get_running_loop()
        self._under_way: dict[int, tuple[Pending, Actors, int]] = {}

    def call(self, header: Call, buffers: Sequence[Fragments]) -> Awaitable[None] | None:
        target = self._objects.now(header.target.object)
        if target is None or header.arguments:
            return self._call_later(header, buffers)
        self._dispatch(header, buffers, target, ())
        return None

    async def _call_later(self, header: Call, buffers: Sequence[Fragments]) -> None:
        target = await self._objects.when(header.target.object)
        self._dispatch(header, buffers, target, await self._arguments(header.arguments))

    def _dispatch(self, header: Call, buffers: Sequence[Fragments], target: object, given: Sequence[Any]) -> None:
        actors, inner, ranks = self.actors_at(target, header.target)
        pending = Pending(header.call, header.adverb, actors.name, header.endpoint, ranks, HostsOf(actors))
        stream = stream_of(header.target.object)
        answer = pending.fail(actors.failed) if actors.failed else pending.died(actors.dead)
        if answer is not None:
            if header.adverb != "broadcast":
                self._answer(answer, stream)
            return
        payload = self.payload(buffers, given)
        selection = "choose" if header.adverb == "choose" else "all"
        if header.adverb == "broadcast":
            self._binding.cast(inner, header.endpoint, header.explicit_port, payload, selection, None)
            return
        self.start(pending, actors, inner, payload, stream, selection, header.explicit_port)

    def start(
        self,
        pending: Pending,
        actors: Actors,
        inner: Any,
        payload: Any,
        stream: int,
        selection: str = "all",
        explicit_port: bool = False,
    ) -> None:
        """Sends a call whose answers go to the laptop on ``stream``."""
        port, receiver = self._binding.open_port()
        self._binding.cast(inner, pending.endpoint, explicit_port, payload, selection, port)
        self._under_way[pending.call] = (pending, actors, stream)
        self._listen(pending, receiver, stream)

    def payload(self, buffers: Sequence[Fragments], given: Sequence[Any]) -> Any:
        if not buffers:
            raise invalid("a call came without its arguments")
        first, *beside = (buffer.fragments for buffer in buffers)
        return self._binding.arguments(first, beside, given)

    def actors_at(self, target: object, ref: MeshRef) -> tuple[Actors, Any, Sequence[int]]:
        """The actor mesh, Monarch's reference to the part ``ref`` of it, and that part's base ranks."""
        if not isinstance(target, Actors):
            raise invalid(f"object {ref.object} is not an actor mesh")
        region = target.region if ref.region is None else ref.region
        part = target.parts.get(region)
        if part is None:
            part = cached(target.parts, region, _Part(target, self._binding))
        return target, part.inner, part.ranks

    def _listen(self, pending: Pending, receiver: Any, stream: int) -> None:
        def arrived(future: asyncio.Future[Any]) -> None:
            if future.cancelled() or pending.over:
                return
            error = future.exception()
            if error is not None:
                self._finish(pending, pending.fail(failure_of(error)), stream)
                return
            reply = self._binding.raw_reply(future.result())
            references = _NO_MESHES
            if reply.references:
                references = Adopted(objects=tuple(self._objects.arrived(mesh) for mesh in reply.references))
            first_failure = reply.exception and not pending.failed
            if self._finish(pending, pending.reply(reply, references), stream):
                return
            if first_failure and pending.adverb != "stream":
                self._loop.call_later(GATHER_FAILURES, self._told_so_far, pending, stream)
            self._listen(pending, receiver, stream)

        self._binding.receive(receiver).add_done_callback(arrived)

    def _told_so_far(self, pending: Pending, stream: int) -> None:
        if not pending.over:
            self._finish(pending, pending.finish(), stream)

    def _finish(self, pending: Pending, answer: Answer | None, stream: int) -> bool:
        """Sends ``answer``, if there is one; whether the call is over."""
        if answer is not None:
            self._answer(answer, stream)
        if pending.over:
            self._under_way.pop(pending.call, None)
            if not self._under_way:
                self._idle()  # no other answer is on its way that could leave with this one
        return pending.over

    def _answer(self, answer: Answer, stream: int) -> None:
        self._send(answer.header, answer.buffers, stream=stream)

    def fail(self, actors: Actors) -> None:
        """Ends the calls on ``actors`` that wait for ranks which are dead, or for a mesh that failed."""
        for pending, target, stream in list(self._under_way.values()):
            if target is actors:
                answer = pending.fail(actors.failed) if actors.failed else pending.died(actors.dead)
                self._finish(pending, answer, stream)


class _Part:
    """Makes and holds one part of an actor mesh: Monarch's reference and the base ranks."""

    __slots__ = ("_actors", "_binding", "inner", "ranks")

    def __init__(self, actors: Actors, binding: Binding) -> None:
        self._actors, self._binding = actors, binding
        self.inner: Any = actors.inner
        self.ranks: Sequence[int] = ()

    def __call__(self, region: Any) -> _Part:
        self.ranks = ranks_within(region, self._actors.region, self._actors.name)
        if region != self._actors.region:
            self.inner = self._binding.part_of_actors(self._actors.inner, region)
        return self


class HostsOf:
    """``dict.get`` over the hosts of an actor mesh, by base rank, without making the dict."""

    __slots__ = ("_actors",)

    def __init__(self, actors: Actors) -> None:
        self._actors = actors

    def get(self, rank: int, default: str = "", /) -> str:
        return self._actors.host_of(rank) or default


def failure_of(error: BaseException) -> Failure:
    """What the laptop is told about ``error``."""
    if isinstance(error, RequestFailed):
        return error.failure
    if isinstance(error, (ValueError, TypeError, RuntimeError, OSError)):
        return Failure(kind="supervision" if isinstance(error, RuntimeError) else "invalid", message=told(error))
    return Failure(kind="internal", message=f"{type(error).__name__}: {error}")
