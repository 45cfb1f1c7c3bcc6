"""Runs calls that arrive as one message, and sends their replies together. Delivered by value.

The engine sends many short calls to the same actors as one message to a method that no actor has. This process runs
them through Monarch's own handler, one after the other, each with a port that collects replies. What is finished leaves
in one message to the port of the batch: at the end, after ``PATIENCE``, and before a call that is not known to be
short. So a result neither waits for a long call behind it nor is lost with the process that such a call ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import pickle
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from meshgate_gateway.engine.on_worker.large_messages import LARGE, pickled  # by value too

METHOD = "meshgate_batch"
PATIENCE = 0.001  # seconds that a reply waits for others
SHORT = 200e-6  # seconds; replies do not wait for a call that last took longer
TURN = 16  # calls of an async actor between two turns of its event loop
JOIN_LIMIT = 16 * 1024  # bytes; larger replies are not copied here
FLUSH_BYTES = 256 * 1024
PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
# Messages of replies: the magic, which no pickle begins with, and their number. Then for each reply: the number of its
# call in the batch, whether it is an exception, the microseconds that the call took, and its size. Then their pickles.
MAGIC = b"\0mgb"
HEAD = "!4sI"
ENTRY = "!IBII"
MAX_MICROSECONDS = 2**32 - 1


def decode_replies(data: bytes | memoryview) -> Iterator[tuple[int, bool, float, bytes | memoryview]]:
    """Of each reply in a message: the number of its call, whether it is an exception, its seconds and its pickle."""
    _, count = struct.unpack_from(HEAD, data)
    start = struct.calcsize(HEAD)
    at = start + struct.calcsize(ENTRY) * count
    for number, exception, microseconds, nbytes in struct.iter_unpack(ENTRY, data[start:at]):
        yield number, bool(exception), microseconds / 1e6, data[at : at + nbytes]
        at += nbytes


def encode_replies(replies: list[tuple[int, bool, float, Any]]) -> list[Any]:
    """The pieces of the message that ``decode_replies`` takes apart."""
    head = [struct.pack(HEAD, MAGIC, len(replies))]
    for number, exception, seconds, data in replies:
        head.append(struct.pack(ENTRY, number, exception, min(int(seconds * 1e6), MAX_MICROSECONDS), len(data)))
    if sum(len(data) for *_, data in replies) <= JOIN_LIMIT:
        return [b"".join((*head, *(data for *_, data in replies)))]
    return [b"".join(head), *(data for *_, data in replies)]


def run_batches(
    rank_of: Callable[[Any], int | None], ask: Callable[..., None], standin: Callable[..., Any], arriving: Any
) -> None:
    """From now on actors of this process run batches.

    ``rank_of(port)`` is the rank in a reply to a port of the engine's; ``ask(nbytes, reply=True)`` raises MemoryError
    if the engine has no room for a reply; ``standin(error, reason)`` takes the place of an exception that cannot be
    pickled; ``arriving.next`` gets the number of the call that Monarch's handler is about to take.
    """
    from monarch._src.actor.actor_mesh import _Actor  # noqa: PLC0415 - resolved on the worker

    handle_now, handle_sync_now = _Actor.handle, _Actor.handle_sync
    late = LateReplies()
    begin = functools.partial(Batch, rank_of, ask, standin, late)

    def handle_sync(
        self: Any, ctx: Any, method: Any, message: Any, panic: Any, local: Any, refs: Any, port: Any, *more: Any
    ) -> None:
        if method.name != METHOD:
            handle_sync_now(self, ctx, method, message, panic, local, refs, port, *more)
            return
        inbox = sys._getframe(2).f_locals.get("inbox")  # of Monarch's loop, which discards messages after a stop
        batch = begin(port)
        with contextlib.closing(batch):
            for specifier, arguments, reply in batch.calls(message):
                if inbox is not None and inbox.stopping():
                    return
                arriving.next = reply.call
                handle_sync_now(self, ctx, specifier, arguments, panic, local, refs, reply, *more)

    def handle(
        self: Any, ctx: Any, method: Any, message: Any, panic: Any, local: Any, refs: Any, port: Any, *more: Any
    ) -> Any:
        if method.name != METHOD:
            return handle_now(self, ctx, method, message, panic, local, refs, port, *more)
        return run(self, ctx, message, panic, local, refs, port, *more)

    async def run(self: Any, ctx: Any, message: Any, panic: Any, local: Any, refs: Any, port: Any, *more: Any) -> None:
        batch = begin(port)
        with contextlib.closing(batch):
            for specifier, arguments, reply in batch.calls(message):
                if reply.number % TURN == TURN - 1:
                    await asyncio.sleep(0)  # Monarch's callbacks and other tasks run, and a stop is noticed
                arriving.next = reply.call
                await handle_now(self, ctx, specifier, arguments, panic, local, refs, reply, *more)

    _Actor.handle, _Actor.handle_sync = handle, handle_sync


class Batch:
    """The calls of one message and their replies. Replies leave on two threads; ``_lock`` keeps them in order."""

    def __init__(
        self,
        rank_of: Callable[[Any], int | None],
        ask: Callable[..., None],
        standin: Callable[..., Any],
        late: LateReplies,
        port: Any,
    ) -> None:
        from monarch._src.actor import actor_mesh  # noqa: PLC0415 - resolved on the worker

        self.monarch: Any = actor_mesh
        self.ask, self.standin = ask, standin
        self._rank_of, self._late, self._port = rank_of, late, port
        self._lock = threading.Lock()
        self._replies: list[tuple[int, bool, float, Any]] = []  # that were not sent yet
        self._nbytes = 0
        self._since = 0.0  # when the first of these was added
        self.error: BaseException | None = None  # why replies could not be sent from the thread of ``LateReplies``

    def calls(self, message: Any) -> Iterator[tuple[Any, Any, ReplyPort]]:
        """Of each call, in order: the method, the pickled arguments, and the port for the reply."""
        from monarch._rust_bindings.monarch_hyperactor.buffers import Buffer  # noqa: PLC0415 - resolved on the worker

        specifiers: dict[str, Any] = {}
        for number, (endpoint, data, call) in enumerate(pickle.loads(message)):
            specifier = specifiers.get(endpoint)
            if specifier is None:
                specifier = specifiers[endpoint] = self.monarch.MethodSpecifier.ReturnsResponse(endpoint)
            buffer = Buffer()
            buffer.write(data)
            now = time.monotonic()
            if self._replies and (self._late.seconds.get(endpoint, 1.0) > SHORT or now - self._since >= PATIENCE):
                self.send()
            yield specifier, buffer.freeze(), ReplyPort(self, number, call, endpoint, now)

    def add(self, port: ReplyPort, data: Any, *, exception: bool = False, references: Any = ()) -> None:
        """A call is answered. A reply with ``references`` to meshes is sent alone."""
        now = time.monotonic()
        seconds = now - port.started
        self._late.seconds[port.endpoint] = seconds
        reply = (port.number, exception, seconds, data)
        if references:
            self.send()
            with self._lock:
                self._send([reply], list(references))
            return
        with self._lock:
            self._replies.append(reply)
            self._nbytes += len(data)
            if len(self._replies) == 1:
                self._since = now
        if self._nbytes >= FLUSH_BYTES:
            self.send()
        elif self._since == now:
            self._late.watch(self)

    def overdue(self) -> bool | None:
        """Whether a reply has waited for ``PATIENCE``. None: no reply waits."""
        return time.monotonic() - self._since >= PATIENCE if self._replies else None

    def send(self) -> None:
        """Sends what waits. Raises the error that ``LateReplies`` met: it ends the actor, and so the calls."""
        with self._lock:
            if self.error is not None:
                raise self.error
            if self._replies:
                replies, self._replies, self._nbytes = self._replies, [], 0
                self._send(replies, [])

    def _send(self, replies: list[tuple[int, bool, float, Any]], references: list[Any]) -> None:
        from monarch._rust_bindings.monarch_hyperactor.buffers import Buffer  # noqa: PLC0415 - resolved on the worker

        buffer = Buffer()
        for piece in encode_replies(replies):
            buffer.write(piece)
        kind = self.monarch.PythonMessageKind.Result(self._rank_of(self._port))
        self._port._send_message(self.monarch.PythonMessage(kind, buffer.freeze(), references))

    def close(self) -> None:
        """The batch has ended, or its actor has."""
        self.send()


class ReplyPort:
    """Where Monarch's handler sends the result of one call of a batch: it has the methods that the handler uses."""

    __slots__ = ("_batch", "call", "endpoint", "number", "started")

    def __init__(self, batch: Batch, number: int, call: int, endpoint: str, started: float) -> None:
        """``number`` is the place in the batch of the call whose number in the session is ``call``."""
        self._batch, self.number, self.call, self.endpoint, self.started = batch, number, call, endpoint, started

    def _resolve_and_send_blocking(self, result: Any) -> None:
        pending = self._add(result)
        if pending is not None:
            self._batch.add(self, pending[1], references=pending[0].resolve().get().refs)

    def _resolve_and_send(self, result: Any) -> Any:
        pending = self._add(result)
        return None if pending is None else self._add_resolved(*pending)

    async def _add_resolved(self, pending: Any, data: Any) -> None:
        self._batch.add(self, data, references=(await pending.resolve()).refs)

    def _add(self, result: Any) -> tuple[Any, Any] | None:
        """Answers the call, unless the result names a mesh that is still coming up: then the message that names it, and
        its pickle."""
        if type(result) in PLAIN and (type(result) not in (str, bytes) or len(result) < JOIN_LIMIT):
            self._batch.add(self, pickle.dumps(result, 5))  # as Monarch's pickle of it
            return None
        pending, data = self._pickle(result)
        if len(data) >= LARGE:
            self._batch.ask(len(data), reply=True)
        message = pending.try_resolve_now()
        if message is None:
            return pending, data
        self._batch.add(self, data, references=message.refs)
        return None

    def _pickle(self, value: Any) -> tuple[Any, Any]:
        """A message of Monarch's, which finds the meshes that ``value`` refers to, and the pickle."""
        monarch, state = self._batch.monarch, pickled(value)
        buffer = state.buffer()
        # The ``format`` of a view of a buffer of Monarch's is a dangling pointer. A ``PickleBuffer`` does not read it.
        data = bytes(buffer) if len(buffer) <= JOIN_LIMIT else pickle.PickleBuffer(buffer).raw()
        return monarch.PendingMessage(monarch.PythonMessageKind.Result(None), state), data

    def exception(self, error: Any) -> None:
        try:
            pending, data = self._pickle(error)
            message = pending.try_resolve_now() or pending.resolve().get()
        except Exception as reason:  # noqa: BLE001 - whatever a user's __reduce__ raises
            pending, data = self._pickle(self._batch.standin(error, reason))
            message = pending.try_resolve_now()
        self._batch.add(self, data, exception=True, references=message.refs)


class LateReplies:
    """A thread that sends replies which wait for a call that takes longer than expected. The calls' threads cannot."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}  # that each endpoint last took
        self._batches: set[Batch] = set()
        self._waiting = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, batch: Batch) -> None:
        """A reply of ``batch`` begins to wait."""
        self._batches.add(batch)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="meshgate-replies", daemon=True)
            self._thread.start()
        if not self._waiting.is_set():
            self._waiting.set()

    def _run(self) -> None:
        pause = threading.Event()  # is never set
        while True:
            self._waiting.wait()
            self._waiting.clear()
            pause.wait(PATIENCE)
            self.send_overdue()

    def send_overdue(self) -> None:
        """Sends what has waited for ``PATIENCE``."""
        for batch in list(self._batches):
            self._batches.discard(batch)  # before looking: ``watch`` may add it again meanwhile
            overdue = batch.overdue()
            if overdue is False:
                self.watch(batch)
            if not overdue:
                continue
            try:
                batch.send()
            except BaseException as error:  # noqa: BLE001 - the actor's own thread raises it; others' replies go on
                batch.error = error
