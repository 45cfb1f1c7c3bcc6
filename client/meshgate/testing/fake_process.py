"""A worker process whose actors are threads: each runs one endpoint at a time, as an actor of Monarch does."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import io
import pickle
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import cloudpickle
import cloudpickle.cloudpickle as by_value

import meshgate
from meshgate.actors import standins
from meshgate.actors.api import acting_as
from meshgate.errors import ActorError
from meshgate.serialization.worker_expressions import WORKER_NAMES
from meshgate.shapes.shape import Point, Region
from meshgate_wire.messages import Call, ErrorGroup, Failed, Failure, Item, Values

Reply = Callable[[bytes, bool], None]
"""Takes a pickled value, or a pickled exception and True: an ``ActorError`` if the endpoint raised it."""
_NAME_ON_WORKER = {path: name for name, path in WORKER_NAMES.items()}
RANKS_NAMED = 64  # the most ranks that a failure lists, as in the real gateway


@dataclass(frozen=True, slots=True)
class Message:
    """A call of ``endpoint`` as one rank receives it. ``objects``: what its references to ports stand for. ``cast``:
    nothing waits for a reply, so that an exception ends the actor."""

    endpoint: str
    buffers: Sequence[bytes]
    objects: Sequence[Any]
    rank: Point
    cast: bool = False


class FakeProcess:
    """Runs each actor in a thread with an event loop, as a Monarch process does. ``host`` is the name of its host."""

    def __init__(self, name: str, host: str) -> None:
        self.host = host
        self._name = name
        self._bootstrap: FakeActor | None = None
        self._actors: dict[int, FakeActor] = {}

    def stop(self) -> None:
        """Ends all threads. What runs gets cancelled, or is not answered; what was submitted does not run."""
        for actor in self._threads():
            actor.stop()

    def stop_actor(self, actor: int) -> None:
        if actor in self._actors:
            self._actors[actor].stop()

    def join(self, timeout: float) -> None:
        """Waits for the threads to end, at most ``timeout`` seconds."""
        end = time.monotonic() + timeout
        for actor in self._threads():
            actor.join(max(0.0, end - time.monotonic()))

    def bootstrap(self, pickled: bytes, failed: Callable[[str], None]) -> None:
        """Runs the pickled callable of ``spawn_procs(bootstrap=...)``, before any actor."""

        async def run() -> Any:
            result = unpickle([pickled], ())()
            if inspect.isawaitable(result):
                await result

        self._bootstrap = FakeActor(self._name, run, failed)
        self._bootstrap.end()

    def spawn(
        self,
        actor: int,
        buffers: Sequence[bytes],
        objects: Sequence[Any],
        rank: Point,
        failed: Callable[[str], None],
    ) -> None:
        """Creates actor number ``actor`` from its pickled class and arguments. ``failed`` gets the traceback if its
        constructor raises, or an endpoint raises what is no Exception, such as SystemExit: the actor is then dead."""
        bootstrap = self._bootstrap

        async def create() -> Any:
            if bootstrap is not None and not bootstrap.created.result():
                raise _BootstrapFailed
            Class = unpickle(buffers[:1], ())
            args, kwargs = unpickle(buffers[1:], objects)
            with acting_as(_context(rank, rank, f"{Class.__qualname__}[{rank.rank}]")):
                instance = Class(*args, **kwargs)
            if not hasattr(Class, "rank"):
                instance.rank = rank.rank
            instance._fake_point = rank
            return instance

        self._actors[actor] = FakeActor(f"{self._name}-{actor}", create, failed)

    def call(self, actor: int, message: Message, reply: Reply) -> None:
        """Runs an endpoint; passes its value, or the exception it raises, to ``reply``."""
        if actor in self._actors:  # else it could not be spawned, which has been reported
            self._actors[actor].call(message, reply)

    def when_created(self, actor: int | None, callback: Callable[[], None]) -> None:
        """Calls ``callback`` once ``actor``, or without one the process itself, has started, failed or been stopped."""
        waited = self._bootstrap if actor is None else self._actors.get(actor)
        if waited is None:
            callback()
        else:
            waited.created.add_done_callback(lambda _: callback())

    def _threads(self) -> list[FakeActor]:
        return [*([self._bootstrap] if self._bootstrap is not None else []), *self._actors.values()]


class _BootstrapFailed(Exception):
    """That of the process, which has been reported."""


class FakeActor:
    """A thread that awaits ``create()``, and then runs endpoints of its result one at a time."""

    def __init__(self, name: str, create: Callable[[], Awaitable[Any]], failed: Callable[[str], None]) -> None:
        self.created: concurrent.futures.Future[bool] = concurrent.futures.Future()  # False: it has failed
        self._create, self._failed = create, failed
        self._instance: Any = None
        self._tasks: asyncio.Queue[tuple[Message, Reply] | None] = asyncio.Queue()
        self._background: set[asyncio.Task[None]] = set()
        self._stopped = False
        self._loop = asyncio.new_event_loop()
        self._main: asyncio.Task[None] = self._loop.create_task(self._serve())
        self._thread = threading.Thread(target=self._run, name=f"meshgate-fake-process-{name}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ends the thread after what was submitted before."""
        self._soon(self._tasks.put_nowait, None)

    def stop(self) -> None:
        self._stopped = True
        self._soon(self._main.cancel)

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def call(self, message: Message, reply: Reply) -> None:
        self._soon(self._tasks.put_nowait, (message, reply))

    def _soon(self, function: Callable[..., object], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the actor has ended
            self._loop.call_soon_threadsafe(function, *arguments)

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._main)
        if not self.created.done():
            self.created.set_result(False)
        self._loop.close()

    async def _serve(self) -> None:
        try:
            self._instance = await self._create()
        except _BootstrapFailed:
            return
        except BaseException as error:  # noqa: BLE001 - whatever the user's code raises
            self._die(error)
        self.created.set_result(not self._stopped)
        try:
            while (task := await self._tasks.get()) is not None and not self._stopped:
                message, reply = task
                endpoint = _endpoint(type(self._instance), message.endpoint)
                work = self._answer(endpoint, message, reply)
                if endpoint.is_concurrent:
                    running = self._loop.create_task(work)
                    self._background.add(running)
                    running.add_done_callback(self._background.discard)
                else:
                    await work
        finally:
            for background in self._background:
                background.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)

    async def _answer(self, endpoint: _Endpoint, message: Message, reply: Reply) -> None:
        def answer(data: bytes, is_error: bool) -> None:
            if not self._stopped:
                reply(data, is_error)

        try:
            await _run_endpoint(self._instance, endpoint, message, answer)
        except BaseException as error:  # noqa: BLE001 - such as SystemExit, which ends an actor
            self._die(error)

    def _die(self, error: BaseException) -> None:
        """Ends the actor. Passes on why, unless it was stopped."""
        if not self._stopped:
            self._stopped = True
            self._tasks.put_nowait(None)
            self._failed(_traceback_of(error))


@dataclass(frozen=True, slots=True)
class _Endpoint:
    method: Callable[..., Any]
    takes_port: bool
    is_concurrent: bool


def _endpoint(Class: type, name: str) -> _Endpoint:
    """An endpoint of Monarch's or of the stand-ins."""
    found = inspect.getattr_static(Class, name)
    method = getattr(found, "_method", found)
    takes_port = getattr(found, "_explicit_response_port", False)
    if type(found).__name__ == "_ConcurrentEndpointProperty":  # Monarch's: its wrapper always takes a port
        original = inspect.unwrap(method)
        had_port = len(inspect.signature(method).parameters) == len(inspect.signature(original).parameters)
        return _Endpoint(original, had_port, True)
    return _Endpoint(method, takes_port, getattr(found, "_concurrent", False))


async def _run_endpoint(instance: Any, endpoint: _Endpoint, message: Message, reply: Reply) -> None:
    with acting_as(_context(message.rank, instance._fake_point, f"{type(instance).__qualname__}")):
        try:
            args, kwargs = unpickle(message.buffers, message.objects)
            port = (_ResponsePort(reply, message.cast),) if endpoint.takes_port else ()
            value = endpoint.method(instance, *port, *args, **kwargs)
            if inspect.isawaitable(value):
                value = await value
            if not endpoint.takes_port:
                reply(cloudpickle.dumps(value), False)
        except Exception as error:
            if message.cast:
                raise
            reply(pickled_error(error), True)


class _ResponsePort:
    """What an endpoint with ``explicit_response_port=True`` answers through."""

    def __init__(self, reply: Reply, cast: bool) -> None:
        self._reply, self._cast = reply, cast

    def send(self, value: Any) -> None:
        self._reply(cloudpickle.dumps(value), False)

    def exception(self, error: Exception) -> None:
        if self._cast:
            raise error
        self._reply(_pickled(error), True)


def pickled_error(error: Exception) -> bytes:
    """``error`` as an ``ActorError``, with a ``RuntimeError`` in its place if it cannot be pickled."""
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next  # without this module's own frame
    return _pickled(ActorError(error))


def _traceback_of(error: BaseException) -> str:
    """With the frames of the user's code only."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def _pickled(error: Exception) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(error)
    except Exception as reason:  # noqa: BLE001 - whatever a user's __reduce__ raises
        wrapped: Any = error if isinstance(error, ActorError) else None
        text = f"{_text(wrapped.exception if wrapped else error)}\n(this exception cannot be pickled: {_text(reason)})"
        standin: Any = RuntimeError(text)
        if wrapped:
            standin = ActorError(standin)
            standin.exception_formatted = wrapped.exception_formatted
        data = cloudpickle.dumps(standin)
    return data


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


def _context(message_rank: Point, rank: Point, name: str) -> Any:
    """What ``context()`` returns inside the actor."""
    return SimpleNamespace(message_rank=message_rank, actor_instance=SimpleNamespace(rank=rank, actor_id=name))


def unpickle(buffers: Sequence[bytes], objects: Sequence[Any]) -> Any:
    """Opens what the client pickled for a worker: a pickle and the buffers beside it."""
    data, *beside = buffers
    return _WorkerUnpickler(data, [bytearray(buffer) for buffer in beside], objects).load()


class _WorkerUnpickler(pickle.Unpickler):
    """Unpickles as a worker does, but without Monarch, and in the process that the classes came from."""

    def __init__(self, data: bytes, buffers: Sequence[bytearray], objects: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._objects = objects
        self._own_classes: set[type] = set()

    def find_class(self, module: str, name: str, /) -> Any:
        own = {
            ("pkgutil", "resolve_name"): _resolve_name,
            ("cloudpickle.cloudpickle", "_make_skeleton_class"): self._make_class,
            ("cloudpickle.cloudpickle", "_class_setstate"): self._class_setstate,
        }.get((module, name))
        return own or super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        found = self._objects[pid]
        if isinstance(found, NotImplementedError):
            raise found
        return found

    def _make_class(self, metaclass: Any, name: str, bases: Any, facts: Any, tracker: Any, extra: Any) -> Any:
        """The class itself, because it is in this process: a copy would overwrite its methods."""
        known = by_value._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker)
        if known is None:
            return by_value._make_skeleton_class(metaclass, name, bases, facts, tracker, extra)
        self._own_classes.add(known)
        return known

    def _class_setstate(self, Class: type, state: Any) -> type:
        if Class not in self._own_classes:
            by_value._class_setstate(Class, state)
        return Class


def _resolve_name(path: str) -> Any:
    """Meshgate's own object instead of Monarch's, which need not be installed."""
    name = _NAME_ON_WORKER[path]
    return getattr(meshgate, name, None) or getattr(standins, name)


@dataclass(slots=True)
class FakeMesh:
    """A mesh of hosts, processes or actors. Lists are by base rank; hosts have no processes."""

    number: int
    kind: Literal["hosts", "procs", "actors"]
    name: str
    region: Region
    hosts: list[str]
    processes: list[FakeProcess] = field(default_factory=list)
    dead: dict[int, str] = field(default_factory=dict)  # base rank to reason; shared by procs and their actors
    aborted: dict[int, str] = field(default_factory=dict)  # the same of actors alone; for procs: of any of their actors
    parent: FakeMesh | None = None  # what it was spawned on
    failure: Failure | None = None


@dataclass(slots=True)
class FakeCall:
    """A call and the replies so far, by position in the target."""

    header: Call
    mesh: FakeMesh
    ranks: list[int]
    send: Callable[..., None]
    replies: dict[int, tuple[bytes, bool]] = field(default_factory=dict)
    done: bool = False

    def reply(self, position: int, data: bytes, is_error: bool) -> bool:
        """Returns whether the call has failed, and waits for no more ranks than those that are about to fail, too."""
        if self.done or position in self.replies:
            return False
        self.replies[position] = data, is_error
        complete = len(self.replies) == len(self.ranks)
        if self.header.adverb == "broadcast":
            self.done = complete
        elif self.header.adverb == "stream":
            self.done = complete
            if is_error:
                failure = self._failure([ErrorGroup(ranks=(self.ranks[position],), count=1, buffer=0)])
                self.send(Failed(call=self.header.call, rank=position, failure=failure), data)
            else:
                self.send(Item(call=self.header.call, rank=position), data)
        elif complete:
            self.finish()
        return is_error and self.header.adverb in ("call", "call_one", "choose") and not self.done

    def finish(self) -> None:
        """Answers with all values, or with the exceptions so far."""
        if self.done:
            return
        self.done = True
        ranks_of: dict[bytes, list[int]] = {}
        for position, (data, is_error) in sorted(self.replies.items()):
            if is_error:
                ranks_of.setdefault(data, []).append(self.ranks[position])
        if ranks_of:
            groups = [
                ErrorGroup(ranks=tuple(ranks[:RANKS_NAMED]), count=len(ranks), buffer=buffer)
                for buffer, ranks in enumerate(ranks_of.values())
            ]
            self.send(Failed(call=self.header.call, failure=self._failure(groups)), *ranks_of)
        else:
            ranks = (0,) if self.header.adverb == "choose" else None
            self.send(Values(call=self.header.call, ranks=ranks), *(self.replies[i][0] for i in sorted(self.replies)))

    def _failure(self, groups: Sequence[ErrorGroup]) -> Failure:
        ranks = [rank for group in groups for rank in group.ranks][:RANKS_NAMED]
        return Failure(
            kind="actor",
            message=f"Actor call {self.mesh.name}.{self.header.endpoint} failed.",
            mesh=self.mesh.name,
            ranks=tuple(ranks),
            hosts={rank: self.mesh.hosts[rank] for rank in ranks},
            errors=tuple(groups),
            total=len(self.ranks),
            unanswered=len(self.ranks) - len(self.replies),
        )

    def fail(self, failure: Failure) -> None:
        if not self.done:
            self.done = True
            if self.header.adverb != "broadcast":
                self.send(Failed(call=self.header.call, failure=failure))

    def fail_if_dead(self) -> None:
        """Fails the call if a rank that has not replied is dead."""
        reasons = {**self.mesh.dead, **self.mesh.aborted}
        lost = [rank for at, rank in enumerate(self.ranks) if rank in reasons and at not in self.replies]
        if lost:
            self.fail(
                Failure(
                    kind="supervision",
                    message=reasons[lost[0]],
                    mesh=self.mesh.name,
                    ranks=tuple(lost[:RANKS_NAMED]),
                    hosts={rank: self.mesh.hosts[rank] for rank in lost[:RANKS_NAMED]},
                    total=len(self.ranks),
                    unanswered=len(self.ranks) - len(self.replies),
                )
            )
