"""The ledger of a session: what its holder has not read. It is empty until the session is detached.

Everything that the engine sends passes through ``keep`` then. The wire delivers exactly once to one client; the ledger
keeps what that client has not read, so that another can take over.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from meshgate_gateway.engine.detached.holders import Holders
from meshgate_gateway.engine.detached.kept_calls import KeptCalls
from meshgate_gateway.engine.detached.kept_streams import KeptChannels, KeptOutput
from meshgate_gateway.engine.interfaces import CONTROL_STREAM, Handler, Send
from meshgate_wire import Fragments
from meshgate_wire.messages import (
    Attached,
    AttachHosts,
    Call,
    Detach,
    Done,
    Failed,
    Fault,
    Fetch,
    Header,
    Item,
    Keeps,
    NameKept,
    OpenChannel,
    OutputLine,
    PortMessage,
    Read,
    Release,
    Reload,
    Resume,
    Returned,
    SpawnActors,
    SpawnProcs,
    Stop,
    Values,
)
from meshgate_wire.messages import KeptCalls as KeptCallsMessage

Creation = AttachHosts | SpawnProcs | SpawnActors | OpenChannel
CREATIONS = (AttachHosts, SpawnProcs, SpawnActors, OpenChannel)
MAX_GAP = 65_536  # numbers; a client leaves none, and a larger gap is only counted


class Creations:
    """The creations of a session's objects, and which of the meshes the program has stopped."""

    def __init__(self) -> None:
        self._created: dict[int, Creation] = {}
        self._stopped: dict[int, Stop] = {}
        self.named: dict[int, dict[str, NameKept]] = {}  # kept values that have names, each with its part of them

    def add(self, header: Creation) -> None:
        self._created[header.object] = header

    def stopped(self, header: Stop) -> None:
        """Notes that a whole mesh was stopped. Stopped hosts stay usable unless they are shut down."""
        created = self._created.get(header.target.object)
        if header.target.region is None and (header.shutdown or not isinstance(created, AttachHosts)):
            self._stopped[header.target.object] = header

    def released(self, number: int) -> None:
        """Forgets a channel, or kept values. Meshes stay, because others may have been made from them."""
        self.named.pop(number, None)
        if isinstance(self._created.get(number), OpenChannel):
            del self._created[number]

    @property
    def numbers(self) -> Collection[int]:
        """The numbers of the objects."""
        return self._created.keys()

    def __iter__(self) -> Iterator[Creation | NameKept | Stop]:
        """Every creation, parents first, then named values, newest first, and every stop."""
        for number in sorted(self._created):
            yield self._created[number]
        for names in reversed(self.named.values()):
            yield from reversed(names.values())
        yield from self._stopped.values()

    def names(self, kind: type[SpawnProcs | SpawnActors]) -> list[str]:
        """The names of the meshes of one kind that the program has not stopped."""
        found = self._created.items()
        return [each.name for number, each in found if isinstance(each, kind) and number not in self._stopped]


class CallNumbers:
    """Which numbers of calls have arrived. A client counts up, so a number that is missing was posted and lost."""

    def __init__(self) -> None:
        self.highest = 0
        self._missing: set[int] = set()
        self._uncounted = 0

    def start(self, highest: int) -> None:
        """Numbers up to ``highest`` have all been used."""
        self.highest = highest
        self._missing.clear()
        self._uncounted = 0

    def add(self, number: int) -> None:
        if number <= self.highest:
            self._missing.discard(number)
            return
        gap = number - self.highest - 1
        if gap > MAX_GAP:
            self._uncounted += gap
        elif gap:
            self._missing.update(range(self.highest + 1, number))
        self.highest = number

    @property
    def missing(self) -> int:
        return len(self._missing) + self._uncounted


CALLS_IN_A_MESSAGE = 500
NUMBERS_IN_A_MESSAGE = 10_000


class Ledger:
    """``post`` sends to the holder past the ledger. ``queued()`` and ``queued_on(stream)`` are the bytes that wait to
    be sent, ``connected()`` whether a client is connected, ``open_calls()`` the calls that are not answered yet,
    ``streamed(call)`` the positions of the replies that one of them has given. ``detached(name)`` is called once the
    session is, and when it gets another name: from then on, what is sent passes through ``keep``."""

    def __init__(
        self,
        post: Send,
        queued: Callable[[], int],
        queued_on: Callable[[int], int],
        *,
        running: Callable[[int], bool],
        open_calls: Callable[[], Iterable[Call]],
        streamed: Callable[[int], Iterable[int]],
        connected: Callable[[], bool],
        detached: Callable[[str], object],
    ) -> None:
        self.active = False
        self.name = ""
        self.holders = Holders()
        self.creations = Creations()
        self._post, self._queued, self._connected, self._open_calls = post, queued, connected, open_calls
        self._detached, self._streamed = detached, streamed
        self._numbers = CallNumbers()
        self._detached_at = 0  # the number of Detach
        self.calls = KeptCalls(self._send, queued, running)
        self.output = KeptOutput(post, lambda: queued_on(CONTROL_STREAM))
        self.channels = KeptChannels(self._send, queued_on)
        self._faults: deque[Fault] = deque()  # that no holder has reported
        self._last_fault = 0
        self._code_paths: tuple[str, ...] = ()  # those of the version that the program used last
        self._resumed = True

    def handlers(self) -> Mapping[type, Handler]:
        return {
            Detach: self._detach,
            Returned: self._returned,
            Read: self._read,
            Resume: self._resume,
            Fetch: self._fetch,
        }

    def _send(self, header: Header, buffers: Sequence[bytes | memoryview], stream: int) -> None:
        self._post(header, buffers, stream=stream)

    # --- what passes through

    def received(self, header: Header) -> None:
        """A message of the holder has arrived. Called only while ``active``."""
        number = getattr(header, "call", None)
        if number is not None:
            self._numbers.add(number)
            if isinstance(header, Call):
                self.calls.received(header)
                if number < self._detached_at:  # Detach has overtaken it
                    self._post(Keeps(calls=(number,)))

    def record(self, header: Header) -> None:
        """Notes what a later holder must know of a message that is about to be handled, or that names kept values and
        has arrived. Not called for calls and for messages to ports."""
        if isinstance(header, (SpawnProcs, SpawnActors, Reload)) and header.version is not None:
            self._code_paths = header.paths
        if isinstance(header, CREATIONS):
            self.creations.add(header)
        elif isinstance(header, NameKept):
            self.creations.named.setdefault(header.kept, {})[header.name] = header
        elif isinstance(header, Stop):
            self.creations.stopped(header)
        elif isinstance(header, Release):
            for number in header.objects:
                self.creations.released(number)
                self.channels.released(number)

    def keep(self, header: Header, buffers: Sequence[Any], stream: int) -> bool:
        """Keeps a message to the holder, if it is of a kind that is kept. Returns whether it is sent from here."""
        if isinstance(header, (Values, Item, Failed)):
            congested = not self._connected() and self._queued() > 0
            return self.calls.keep(header, buffers, congested=congested)
        if isinstance(header, PortMessage):
            self.channels.keep(header, buffers)
            return True
        if isinstance(header, Fault):
            self._last_fault += 1
            self._faults.append(header.model_copy(update={"number": self._last_fault}))
            if self._resumed:
                self._post(self._faults[-1])
            return True
        return False

    def add_output(self, lines: tuple[OutputLine, ...], *, wanted: bool) -> None:
        self.output.add(lines, read=not wanted)

    def notify(self, text: str) -> None:
        """A line for the user."""
        self.add_output((OutputLine(stream="stderr", mesh="meshgate", text=text),), wanted=True)

    @property
    def full(self) -> bool:
        """Whether workers must wait before they print more."""
        return self.output.full

    def feed(self) -> None:
        """Sends what waits here while the wire has space."""
        self.calls.feed()
        self.output.feed()
        self.channels.feed()

    # --- messages of the holder

    def _detach(self, header: Detach, buffers: Sequence[Fragments]) -> None:
        self.name, first, self.active = header.name, not self.active, True
        self._detached(header.name)
        if first:
            self._numbers.start(header.call)
            self._detached_at = header.call
            numbers = []
            for call in self._open_calls():
                self.calls.received(call, self._streamed(call.call))
                numbers.append(call.call)
            for start in range(0, len(numbers), NUMBERS_IN_A_MESSAGE):
                self._post(Keeps(calls=tuple(numbers[start : start + NUMBERS_IN_A_MESSAGE])))
        self._post(Done(call=header.call))

    def _returned(self, header: Returned, buffers: Sequence[Fragments]) -> None:
        self.calls.returned(header, [buffer.join() for buffer in buffers])

    def _read(self, header: Read, buffers: Sequence[Fragments]) -> None:
        self.calls.mark_read(header.calls)
        self.calls.mark_released(header.released)
        self.channels.mark_taken(header.ports)
        if header.output is not None:
            self.output.mark_read(header.output)
        if header.faults is not None:
            while self._faults and self._faults[0].number <= header.faults:
                self._faults.popleft()

    def _resume(self, header: Resume, buffers: Sequence[Fragments]) -> None:
        self._resumed = True
        for fault in self._faults:
            self._post(fault)
        self.output.resume(replay=header.replay)
        self.channels.resume()

    def _fetch(self, header: Fetch, buffers: Sequence[Fragments]) -> None:
        self.calls.fetch(header.calls)

    # --- takeovers

    def holder_changed(self) -> None:
        """Another client is the holder now. Until it sends ``Resume``, only ``welcome`` may be sent to it."""
        self._resumed = False
        self.calls.holder_changed(self._numbers.highest)
        self.output.holder_changed()
        self.channels.holder_changed()

    def welcome(self, next_object: int, code_version: str | None) -> Iterator[Header]:
        """The calls that are kept, and the last message of what a new holder receives first."""
        calls = self.calls.describe()
        while part := tuple(islice(calls, CALLS_IN_A_MESSAGE)):
            yield KeptCallsMessage(calls=part)
        yield Attached(
            name=self.name,
            takeovers=self.holders.takeovers,
            next_object=next_object,
            next_call=self._numbers.highest + 1,
            never_received=self._numbers.missing,
            code_version=code_version,
            code_paths=self._code_paths,
            previous_holder=self.holders.previous,
            lines_dropped=self.output.dropped,
            unread_lines=self.output.unread,
        )
        self._numbers.start(self._numbers.highest)  # what was lost is reported once

    def describe(self) -> dict[str, Any]:
        """For the list of sessions, as JSON."""
        counts = self.calls.counts()
        return {
            "name": self.name,
            "detached": self.active,
            "age": time.time() - self.holders.started,
            "holder": self.holders.name,
            "takeovers": self.holders.takeovers,
            "procs": self.creations.names(SpawnProcs),
            "actors": self.creations.names(SpawnActors),
            "calls_in_flight": counts["in flight"] if self.active else sum(1 for _ in self._open_calls()),
            "calls_finished": counts["finished"],
            "unread_lines": self.output.unread,
        }

    def close(self) -> None:
        self.calls.close()
        self.output.close()
        self.channels.close()
