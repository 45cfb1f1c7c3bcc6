"""References to kept values, as actors have them: what ``kept.ref()`` arrives as. Delivered by value.

A reference is a few numbers, which an actor passes on or returns like any other value. To fetch the value, its process
asks the engine, which knows what was released and who has died, and has the value delivered as those of arguments are
(``calls/kept_values.py``).

The engine keeps a value while a process has references to it (``calls/kept_meshes.py`` is its end of this):

- A process says to the engine when it gets its first reference to the values of an object, and waits for the answer. So
  a process that has passed the reference to it may drop its own once the call has been answered.
- It says to the engine when its last one is gone, and the end of its connection that it has ended.
- A reference in a message to another actor stays here until a process has said that it has unpickled it: the sender may
  drop its own at once. That is the first process, if there are several.

Pickles name what is here by ``MODULE``, which ``refer_to_values`` puts into ``sys.modules``.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pickle
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from queue import SimpleQueue
from types import ModuleType
from typing import Any

from meshgate_gateway.engine.on_worker.large_messages import call_in, sends_to  # by value too

MODULE = "_meshgate_kept"


class ValueLostError(RuntimeError):
    """The process has ended that kept the value. The driver gets it as ``meshgate.ValueLostError``."""


class KeptRef:
    """A value that stays in a process of the session, as long as there is a reference to it.

    ``number`` is that of its object in the session, ``position`` its rank in the call ``label`` that returned it, and
    ``rank`` the base rank of the process that keeps it. ``passed`` says which reference of which process this is a copy
    of, if that waits for it.
    """

    def __init__(
        self, number: int, position: int, rank: int, label: str, passed: tuple[int, int, int] | None = None
    ) -> None:
        self._number, self._position, self._rank, self._label = number, position, rank, label
        module: Any = sys.modules[MODULE]
        try:
            module.references.add(self, number, passed)
        except OSError as refused:
            raise RuntimeError(f"cannot refer to {self._what()}: the engine cannot be asked: {refused}") from refused

    def get(self) -> Any:
        """The value: the object itself in the process that keeps it, a copy elsewhere. Blocks until it is here;
        ``await ref`` does not.

        Raises ``ValueLostError`` if the process that keeps it has ended, ``RuntimeError`` if it was released.
        """
        module: Any = sys.modules[MODULE]
        store = getattr(module, "store", None)
        if store is not None and (kept := store.find(self._number, self._position)) is not None:
            return kept.value
        if os.getpid() != module.hello["pid"]:  # the value would come to the process of the actor
            raise RuntimeError(f"cannot get {self._what()} in a forked process: get it before the fork")
        place = {"stream": "kept", "object": self._number, "at": self._rank}
        try:
            with module.connect() as connection:
                connection.sendall(json.dumps({**module.hello, **place}).encode() + b"\n")
                with connection.makefile("rb") as file:
                    answer = file.read()
        except OSError as refused:
            raise RuntimeError(f"cannot get {self._what()}: the engine cannot be asked: {refused}") from refused
        kind, content = answer[:1], answer[1:]
        if kind == b"+":
            return module.store.take(int(content), 0)
        if kind == b"!":
            raise pickle.loads(content)
        reason = content.decode() or "the session or this mesh has ended"
        error: Any = (ValueLostError if kind == b"?" else RuntimeError)(f"cannot get {self._what()}: {reason}")
        error.call, error.ranks = self._label, (self._position,)
        raise error

    def _what(self) -> str:
        return f"the value of {self._label} on rank {self._position}"

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.to_thread(self.get).__await__()

    def __reduce__(self) -> Any:
        module: Any = sys.modules[MODULE]
        passed = module.references.passed(self)
        place = (self._number, self._position, self._rank, self._label)
        return type(self), (*place, passed) if passed else place

    def __repr__(self) -> str:
        return f"<reference to {self._what()}>"


class ProcessReferences:
    """The references of one process. Thread-safe. ``connect()`` connects to the engine, which happens with the first.

    A forked process has none of its own: its copies keep nothing.
    """

    def __init__(self, connect: Callable[[], socket.socket], hello: Mapping[str, Any]) -> None:
        self._connect, self._hello = connect, {**hello, "stream": "references"}
        self._lock = threading.Lock()
        self.counts: dict[int, int] = {}  # of references, by object
        # The objects of references that are gone. A finalizer may interrupt a thread that has the lock.
        self._gone: SimpleQueue[int] = SimpleQueue()  # 0: the connection has ended
        self._answers: SimpleQueue[bool] = SimpleQueue()  # False: the connection has ended
        self._connection: socket.socket | None = None
        self._on_the_way: dict[int, KeptRef] = {}  # those that were passed to other processes
        self._numbers = itertools.count(1)
        self._sending = threading.local()  # ``message``: what a thread pickles

    def add(self, reference: KeptRef, number: int, passed: tuple[int, int, int] | None) -> None:
        """There is one more reference to a value of object ``number``: a copy of the one that was ``passed``. When this
        returns, the engine knows of it.

        Raises OSError if the engine cannot be reached.
        """
        if os.getpid() != self._hello["pid"]:
            return
        with self._lock:
            count = self.counts.get(number, 0)
            hold = b"" if count else b"+%d\n" % number
            taken = b"=%d %d %d\n" % passed if passed else b""
            if hold or taken:
                self._tell(hold + taken)
            if hold and not self._answers.get():
                self._answers.put(False)
                raise ConnectionError("the session or this mesh has ended")
            self.counts[number] = count + 1
        weakref.finalize(reference, self._gone.put, number).atexit = False

    def _tell(self, lines: bytes) -> None:
        if self._connection is None:
            connection = self._connect()
            connection.sendall(json.dumps(self._hello).encode() + b"\n")
            for name, target in (("receive", lambda: self._receive(connection)), ("drop", self._drop_gone)):
                threading.Thread(target=target, name=f"meshgate-references-{name}", daemon=True).start()
            self._connection = connection
        self._connection.sendall(lines)

    def _receive(self, connection: socket.socket) -> None:
        """Reads answers, and the numbers of references that have arrived where they were passed to."""
        try:
            with connection.makefile("rb") as lines:
                for line in lines:
                    if line == b"+\n":
                        self._answers.put(True)
                    else:
                        self._on_the_way.pop(int(line), None)
        except OSError:
            pass  # as its end
        finally:
            self._answers.put(False)
            self._gone.put(0)

    def _drop_gone(self) -> None:
        while number := self._gone.get():
            with self._lock:
                self.counts[number] -= 1
                if self.counts[number]:
                    continue
                del self.counts[number]
                try:
                    self._tell(b"-%d\n" % number)
                except OSError:  # the engine has ended, and this process is about to
                    return

    def sending(self, to_actor: Callable[[], bool], send: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of ``send``, which pickles a message, perhaps ``to_actor``."""
        local, numbers = self._sending, list[int]()
        before = getattr(local, "message", None)
        local.message = to_actor, numbers
        try:
            return send(*args, **kwargs)
        except BaseException:  # the message does not leave
            for number in numbers:
                self._on_the_way.pop(number, None)
            raise
        finally:
            local.message = before

    def passed(self, reference: KeptRef) -> tuple[int, int, int] | None:
        """What the copies of ``reference`` in the message that this thread pickles get as ``passed``. From now on the
        reference is on its way. None: it does not go to another actor."""
        message = getattr(self._sending, "message", None)
        if message is None or not message[0]():
            return None
        number = next(self._numbers)
        self._on_the_way[number] = reference
        message[1].append(number)
        return self._hello["mesh"], self._hello["rank"], number

    def statistics(self) -> dict[str, int]:
        """To how many objects there are references, and how many of these are on their way."""
        return {"objects": len(self.counts), "on_the_way": len(self._on_the_way)}


def refer_to_values(connect: Callable[[], socket.socket], hello: Mapping[str, Any]) -> ProcessReferences:
    """From now on this process can have references. ``connect()`` connects to the engine."""
    module: Any = sys.modules.setdefault(MODULE, ModuleType(MODULE))
    for kind in (KeptRef, ValueLostError):
        kind.__module__ = MODULE  # so that it is pickled by name, and is one class in all processes
        setattr(module, kind.__name__, kind)
    module.refer, module.refer_to_all, module.connect, module.hello = refer, refer_to_all, connect, hello
    references: ProcessReferences = ProcessReferences(connect, hello)
    module.references = references
    return references


def keep_what_is_passed_on(references: ProcessReferences, root: str) -> None:
    """From now on references in messages of this process stay until they have arrived. ``root`` is the actor id of the
    engine, to which none are passed: the driver takes references to what it holds itself.

    Call it after ``ask_before_large_messages`` and before ``report_what_is_sent``, which replace these methods, too.
    """
    from monarch._src.actor import actor_mesh  # noqa: PLC0415 - resolved on the worker

    Port: Any = actor_mesh.Port
    call_now, result_now, send_now = actor_mesh._create_endpoint_message, Port._pending_result, Port.send

    def create_endpoint_message(*args: Any, **kwargs: Any) -> Any:
        if not references.counts:
            return call_now(*args, **kwargs)
        return references.sending(lambda: True, call_now, *args, **kwargs)

    def pending_result(self: Any, value: Any) -> Any:
        if not references.counts:
            return result_now(self, value)
        frame = sys._getframe(1)
        return references.sending(lambda: answers_an_actor(frame), result_now, self, value)

    def send(self: Any, obj: Any) -> None:
        if not references.counts:
            send_now(self, obj)
            return
        to_engine = sends_to(self, root)  # Monarch borrows the port while it sends
        references.sending(lambda: not to_engine, send_now, self, obj)

    send.__doc__ = send_now.__doc__
    actor_mesh._create_endpoint_message = create_endpoint_message
    Port._pending_result, Port.send = pending_result, send


def answers_an_actor(frame: Any) -> bool:
    """Whether the code that runs in ``frame`` is known to reply to another actor's call."""
    call = call_in(frame)
    return call is not None and call["correlation_id"] is not None


def refer(
    number: int,
    label: str,
    places: Sequence[tuple[int, int]],
    at: int | None,
    passed: tuple[int, int, int] | None,
) -> KeptRef:
    """A reference in the arguments of the call that is being unpickled. ``places`` are positions and base ranks, by
    rank of the call; ``at``: the index among them, if it is not that rank."""
    from monarch.actor import context  # noqa: PLC0415 - resolved on the worker

    return KeptRef(number, *places[context().message_rank.rank if at is None else at], label, passed)


def refer_to_all(
    number: int,
    label: str,
    places: Sequence[tuple[int, int]],
    labels: Sequence[str],
    sizes: Sequence[int],
    passed: tuple[int, int, int] | None,
) -> Any:
    """As ``refer``, to all values. One of the references says for all that they have arrived."""
    from monarch.actor import Extent, ValueMesh  # noqa: PLC0415 - resolved on the worker

    references = [KeptRef(number, *place, label, None if at else passed) for at, place in enumerate(places)]
    return ValueMesh(Extent(list(labels), list(sizes)).region.as_shape(), references)
