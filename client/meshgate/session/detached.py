"""The client's side of detached sessions: what the program has read, and what a new holder finds.

What was read is collected for one message to the gateway now and then. A new holder learns what there is from the
gateway's first messages, and recognizes calls by their tags. Nothing here sends or waits by itself.
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from meshgate.session.futures import FutureProxy
from meshgate.session.objects import ObjectTable
from meshgate.session.pending_calls import PendingCall, PendingCalls
from meshgate_wire import Fragments
from meshgate_wire.messages import (
    Attached,
    AttachHosts,
    Call,
    Failed,
    Header,
    Item,
    KeptCall,
    KeptCalls,
    NameKept,
    OpenChannel,
    Read,
    Returned,
    SpawnActors,
    SpawnProcs,
    Stop,
    Values,
)

MAX_CALLS = 10_000  # in one message
Creation = AttachHosts | SpawnProcs | SpawnActors | OpenChannel | NameKept


class ReadMarks:
    """Any thread, and finalizers, may mark: nothing here takes a lock. ``due()`` is called after the first mark since
    ``take``."""

    def __init__(self, due: Callable[[], None]) -> None:
        self._due = due
        self._pending = False
        self._read: deque[int] = deque()
        self._released: deque[int] = deque()
        self._messages: deque[tuple[int, int]] = deque()  # channel and number of messages that were read
        self._unread: dict[int, int] = {}  # channel to the first message that was not read; of the connection's thread
        self._read_early: dict[int, set[int]] = {}  # channel to messages behind that one; of the same thread
        self._line: int | None = None
        self._fault: int | None = None

    def watch_call(self, number: int, futures: Sequence[FutureProxy[Any]]) -> None:
        """Marks call ``number`` once all of ``futures`` have been read, or the program has dropped the last of them."""
        left = [number] * len(futures)  # not the futures, which would keep each other alive

        def observed() -> None:
            left.pop()
            if not left:
                self.call_read(number)

        for future in futures:
            future.when_read(observed)
        weakref.finalize(futures[-1], self._call_released, number).atexit = False

    def call_read(self, number: int) -> None:
        self._read.append(number)
        self._mark()

    def _call_released(self, number: int) -> None:
        self._released.append(number)
        self._mark()

    def message_arrived(self, port: int, number: int) -> None:
        """A message of channel ``port`` has arrived. To be called in the order of their numbers."""
        self._unread.setdefault(port, number)

    def watch_message(self, port: int, number: int, future: FutureProxy[Any]) -> None:
        """Marks a message once ``future`` has been read. It is not settled yet."""
        future.when_read(lambda: self._message_read(port, number))

    def _message_read(self, port: int, number: int) -> None:
        self._messages.append((port, number))
        self._mark()

    def _ports_read(self) -> dict[int, int]:
        """The last message of each channel up to which all were read, if it has changed."""
        ports: dict[int, int] = {}
        for _ in range(len(self._messages)):
            port, number = self._messages.popleft()
            early = self._read_early.setdefault(port, set())
            early.add(number)
            while (unread := self._unread[port]) in early:
                early.remove(unread)
                ports[port] = unread
                self._unread[port] = unread + 1
        return ports

    def printed(self, last_line: int) -> None:
        self._line = last_line
        self._mark()

    def fault_reported(self, number: int) -> None:
        self._fault = number
        self._mark()

    def _mark(self) -> None:
        if not self._pending:
            self._pending = True
            try:
                self._due()
            except BaseException:  # Ctrl-C: the next mark makes it due
                self._pending = False
                raise

    def take(self) -> Read | None:
        """What was marked since the last time. For the connection's thread."""
        self._pending = False
        calls, released = _taken(self._read), _taken(self._released)
        ports = self._ports_read()
        line, self._line = self._line, None
        fault, self._fault = self._fault, None
        if self._read or self._released:
            self._mark()
        if not (calls or released or ports) and line is None and fault is None:
            return None
        return Read(calls=calls, released=released, ports=ports, output=line, faults=fault)


class Returns:
    """Sends back what was on its way when the session was detached: the gateway had sent it, and keeps it no more.

    ``post`` sends to the gateway. ``complete(sent)`` is called once all of it has been sent back; ``sent``: there was
    something. For the connection's thread.
    """

    def __init__(
        self,
        calls: PendingCalls,
        post: Callable[[Returned, Sequence[Fragments]], None],
        complete: Callable[[bool], None],
    ) -> None:
        self._calls, self._post, self._complete = calls, post, complete
        self._sent = False
        self._kept: set[int] = set()  # calls whose replies the gateway keeps
        # Until the gateway has noted it, every reply, since any may have been sent before.
        self._arrived: list[tuple[PendingCall, Returned, Sequence[Fragments]]] | None = []
        self._awaited: set[int] = set()  # then, the calls whose replies are still on their way

    def arrived(self, call: PendingCall, header: Values | Item | Failed, buffers: Sequence[Fragments]) -> None:
        """To be called with each reply, before ``call`` takes it."""
        request = _request_of(call)
        if request is None or (self._arrived is None and call.number not in self._awaited):
            return
        request = request.model_copy(update={"arguments": (), "trace": {}})
        returned = Returned(request=request, reply=header, given=sum(each.done() for each in call.futures()))
        if self._arrived is None:
            self._send(returned, buffers)
        else:
            self._arrived.append((call, returned, buffers))

    def keeps(self, numbers: Iterable[int]) -> None:
        """The gateway keeps these calls, so it sends their replies from now on."""
        self._kept.update(numbers)
        for number in self._awaited.intersection(self._kept):
            self._over(number)

    def noted(self, number: int) -> None:
        """The gateway has noted Detach, which has this number, and has said which calls it keeps."""
        arrived, self._arrived = self._arrived or [], None
        for call, returned, buffers in arrived:
            unread = any(not future._was_read for future in call.futures())
            if call.number not in self._kept and unread:
                self._send(returned, buffers)
        earlier = [each for each in self._calls if each.number < number and each.number not in self._kept]
        awaited = [each for each in earlier if _request_of(each) is not None]
        self._awaited.update(each.number for each in awaited)
        for call in awaited:
            call.futures()[-1].when_settled(partial(self._over, call.number))
        if not awaited:
            self._complete(self._sent)

    def _send(self, returned: Returned, buffers: Sequence[Fragments]) -> None:
        self._sent = True
        self._post(returned, buffers)

    def _over(self, number: int) -> None:
        if number in self._awaited:
            self._awaited.remove(number)
            if not self._awaited:
                self._complete(self._sent)


def _request_of(call: PendingCall) -> Call | None:
    """The request of a call of an endpoint whose results do not stay in their processes."""
    return call.header if isinstance(call.header, Call) and not call.header.keep else None


def _taken(marks: deque[int]) -> tuple[int, ...]:
    return tuple(marks.popleft() for _ in range(min(len(marks), MAX_CALLS)))


@dataclass(slots=True)
class Takeover:
    """The state of a session that an earlier holder left. ``complete`` settles once all of it has arrived, and fails if
    the session ends before that.

    ``mesh_sizes``: the number of hosts of each of the job's meshes. Messages are added on the connection thread.
    """

    objects: ObjectTable
    mesh_sizes: Mapping[str, int]
    created: list[Creation] = field(default_factory=list)
    calls: list[KeptCall] = field(default_factory=list)
    complete: FutureProxy[Attached] = field(default_factory=FutureProxy)

    def add(self, header: Header) -> None:
        """Takes one of the gateway's messages about the state."""
        if isinstance(header, KeptCalls):
            self.calls += header.calls
        elif isinstance(header, Attached):
            self.objects.continue_at(header.next_object)
            self.complete.settle(lambda: header)
        elif isinstance(header, Stop):
            if self.objects.get(header.target.object) is not None:
                self.objects.stop(header.target.object, header.reason)
        elif isinstance(header, Creation):
            self._created(header)

    def _created(self, header: Creation) -> None:
        """Notes an object at once, since messages about it may follow."""
        number = header.kept if isinstance(header, NameKept) else header.object
        if isinstance(header, NameKept):
            self.objects.restore(number, "kept", header.label, header.label, (header.procs,))
        elif isinstance(header, AttachHosts):
            hosts = self.objects.restore(number, "hosts", header.mesh, f"attaching the hosts of {header.mesh!r}")
            hosts.expected_hosts = self.mesh_sizes.get(header.mesh, 0)
        elif isinstance(header, SpawnProcs):
            step = f"spawn_procs({dict(header.per_host)}, name={header.name!r})"
            self.objects.restore(number, "procs", header.name, step, (header.hosts.object,))
        elif isinstance(header, SpawnActors):
            parents = (header.procs.object, *(argument.ref.object for argument in header.arguments))
            step = f"spawn({header.name!r}, {header.class_name})"
            self.objects.restore(number, "actors", header.name, step, parents)
        else:
            self.objects.restore(number, "port", header.name, "Channel.open()")
        self.created.append(header)


MAX_TAG = 256  # characters

_tag: contextvars.ContextVar[str] = contextvars.ContextVar("meshgate_tag", default="")
current_tag = _tag.get


@contextlib.contextmanager
def tag(text: str) -> Iterator[None]:
    """Marks the calls made in a ``with`` block, as in ``with meshgate.tag("step-12")``.

    After ``job.attach()`` each call has its tag. The innermost block counts. Raises TypeError or ValueError if ``text``
    is not a string of 1 to 256 characters.
    """
    if not isinstance(text, str):
        raise TypeError(f"a tag must be a string, not {text!r}")
    if not text or len(text) > MAX_TAG or any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"a tag must be valid text of 1 to {MAX_TAG} characters, not {text[:300]!r}")
    token = _tag.set(text)
    try:
        yield
    finally:
        _tag.reset(token)
