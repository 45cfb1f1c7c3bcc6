"""Routes each message of the gateway. Runs on the connection thread and never blocks it."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, get_args
from weakref import WeakValueDictionary

from meshgate.errors import MeshgateError, copy_of
from meshgate.session.detached import Creation, ReadMarks, Returns, Takeover
from meshgate.session.errors.failures import dependency_failure, failure_of_fault, from_failure
from meshgate.session.errors.faults import handle_fault
from meshgate.session.inbox import Inbox
from meshgate.session.objects import EndingHost, ObjectTable
from meshgate.session.output.aggregation import Aggregator
from meshgate.session.output.printer import OutputPrinter, kind_of
from meshgate.session.pending_calls import PendingAck, PendingCall, PendingCalls, Reader
from meshgate.session.serial_thread import SerialThread
from meshgate_wire import Fragments, Header, MessageReceived
from meshgate_wire.messages import (
    Attached,
    Done,
    Failed,
    Failure,
    Fault,
    HostEnding,
    HostsAttached,
    Item,
    Keeps,
    KeptCalls,
    ObjectFailed,
    Output,
    OutputLine,
    PortMessage,
    Progress,
    Stop,
    Sync,
    Values,
)

log = logging.getLogger("meshgate.session.dispatch")

_OF_A_TAKEOVER = (*get_args(Creation), Stop, KeptCalls, Attached)


class Dispatcher:
    """The connection's ``Listener``.

    ``consume`` returns a message's credit to the gateway; ``release`` releases an object there.
    """

    def __init__(
        self,
        objects: ObjectTable,
        calls: PendingCalls,
        reader: Reader,
        consume: Callable[[MessageReceived], None],
        release: Callable[[int], None],
        printer: OutputPrinter | None = None,
    ) -> None:
        self.inboxes: WeakValueDictionary[int, Inbox] = WeakValueDictionary()
        self.on_sync: Callable[[Sync, Sequence[Fragments]], None] = lambda header, buffers: None
        self.takeover: Takeover | None = None  # of a session that this client has taken over
        self.marks: ReadMarks | None = None  # of a detached session
        self.returns: Returns | None = None  # while the session is being detached
        self.hidden_procs: set[int] = set()  # proc meshes whose output is not shown
        self.job_lost = False  # whether a fault has said that the job has no host any more
        self.handled_faults: set[int] = set()  # meshes whose faults another part of this package reports
        self._printer = printer or OutputPrinter()
        self.aggregator = Aggregator(lambda lines: self._printer.put(lines, lambda: None))
        self._notice_shown = False  # whether the last notice of the connection may still change
        self._fault_thread = SerialThread("meshgate-faults")
        self._objects = objects
        self._calls = calls
        self._reader = reader
        self._consume = consume
        self._release = release
        self._handlers: dict[type, Callable[[Any, MessageReceived], None]] = {
            Values: self._values,
            Item: self._item,
            Done: self._done,
            Progress: self._progress,
            Failed: self._failed,
            ObjectFailed: self._object_failed,
            HostsAttached: self._hosts_attached,
            HostEnding: self._host_ending,
            Fault: self._fault,
            Output: self._output,
            PortMessage: self._port_message,
            Keeps: self._keeps,
            Sync: lambda header, message: self.on_sync(header, message.buffers),
            **dict.fromkeys(_OF_A_TAKEOVER, self._taken_over),
        }

    def follow_caller(self) -> None:
        """Output is printed under the caller's cell of a notebook from now on."""
        self._printer.follow_caller()

    def close(self, timeout: float) -> None:
        """Waits until all output is printed and every fault hook has returned, for up to ``timeout`` seconds each."""
        self.aggregator.close()
        self._printer.close(timeout)
        self._fault_thread.close(timeout)

    # --- Listener

    def message_received(self, message: MessageReceived) -> None:
        header = message.header
        handler = self._handlers.get(type(header))
        if handler is None:
            log.debug("ignoring an unexpected %s message", type(header).__name__)
        else:
            try:
                handler(header, message)
            except Exception as error:
                log.exception("invalid %s message from the gateway", type(header).__name__)
                self._fail_invalid_reply(getattr(header, "call", None), error)
        if message.held and not isinstance(header, (Output, PortMessage)):
            self._consume(message)

    def connection_notice(self, text: str, final: bool) -> None:
        in_place = not final and kind_of(sys.stderr) != "file"
        if final or in_place or not self._notice_shown:  # a file keeps every line
            line = OutputLine(stream="stderr", mesh="meshgate", text=text, end="\r" if in_place else "\n")
            self._printer.put([line], lambda: None)
        self._notice_shown = not final

    def session_ended(self, error: MeshgateError) -> None:
        for call in self._calls.pop_where(lambda _: True):
            call.fail(lambda: copy_of(error))
        for inbox in list(self.inboxes.values()):
            inbox.close(lambda: copy_of(error))
        if self.takeover is not None:
            self.takeover.complete.fail(error)

    def forked(self, error: MeshgateError) -> None:
        for call in self._calls.pop_where(lambda _: True):
            for future in call.futures():
                future.fail_after_fork(error)
        for inbox in list(self.inboxes.values()):
            inbox.close_after_fork(error)
        if self.takeover is not None:
            self.takeover.complete.fail_after_fork(error)

    # --- replies

    def _values(self, header: Values, message: MessageReceived) -> None:
        call = self._calls.get(header.call)
        if call is not None:
            if self.returns is not None:
                self.returns.arrived(call, header, message.buffers)
            call.unprinted = self._printer.unprinted() if self._printer.printed < self._printer.posted else None
            call.values_received(self._reader, header, message.buffers)
            self._calls.pop(header.call)

    def _item(self, header: Item, message: MessageReceived) -> None:
        call = self._calls.get(header.call)
        if call is not None:
            if self.returns is not None:
                self.returns.arrived(call, header, message.buffers)
            call.unprinted = self._printer.unprinted()
            if call.item_received(self._reader, header, message.buffers):
                self._calls.pop(header.call)

    def _done(self, header: Done, message: MessageReceived) -> None:
        call = self._calls.pop(header.call)
        if isinstance(call, PendingAck):
            call.done_received()

    def _progress(self, header: Progress, message: MessageReceived) -> None:
        now = time.monotonic()
        for progress in header.calls:
            call = self._calls.get(progress.call)
            if call is not None:
                call.progress = progress, now

    def _failed(self, header: Failed, message: MessageReceived) -> None:
        call = self._calls.get(header.call)
        if call is not None:
            if self.returns is not None:
                self.returns.arrived(call, header, message.buffers)
            call.unprinted = self._printer.unprinted()
            found = self._objects.failure_of(call.target) if _is_of_creation(call, header.failure) else None
            if found is not None and found[0].failure is not None:  # the same error as for calls that are not sent
                self._fail_call(header.call, dependency_failure(self._objects, call.target, call.endpoint, found[1]))
            elif call.failure_received(self._reader, header, message.buffers):
                self._calls.pop(header.call)

    def _keeps(self, header: Keeps, message: MessageReceived) -> None:
        if self.returns is not None:
            self.returns.keeps(header.calls)

    def _fail_call(self, number: int | None, make_error: Callable[[], Exception]) -> None:
        call = self._calls.pop(number) if number is not None else None
        if call is not None:
            call.fail(make_error)

    def _fail_invalid_reply(self, number: int | None, error: Exception) -> None:
        failure = Failure(kind="internal", message=f"invalid reply from the gateway: {error!r}")
        self._fail_call(number, lambda: from_failure(failure))

    # --- objects

    def _taken_over(self, header: Header, message: MessageReceived) -> None:
        if self.takeover is not None:
            self.takeover.add(header)

    def _object_failed(self, header: ObjectFailed, message: MessageReceived) -> None:
        self._creation_failed(header.object, header.failure)

    def _creation_failed(self, number: int, failure: Failure) -> None:
        unreferenced = self._objects.fail(number, failure)
        for call in self._calls.pop_where(lambda call: self._objects.derives_from(call.target, number)):
            call.fail(dependency_failure(self._objects, call.target, call.endpoint, failure))
        for each in unreferenced:
            self._release(each)

    def _hosts_attached(self, header: HostsAttached, message: MessageReceived) -> None:
        hosts = self._objects.get(header.object)
        if hosts is None:
            return
        # The same hosts, of which some were about to end, stay: a host that replaces another has another address.
        if hosts.hosts and not (hosts.ending and hosts.hosts == header.hosts):
            self._objects.host_restarts[hosts.name] += 1
        hosts.hosts, hosts.ending = header.hosts, {}
        if self.takeover is not None and not self.takeover.complete.done():
            hosts.expected_hosts = len(header.hosts)  # the job may have been scaled since the mesh was attached
        if len(header.hosts) != hosts.expected_hosts:
            reason = (
                f"mesh {hosts.name!r} has {len(header.hosts)} hosts, but the job has {hosts.expected_hosts} as far as "
                "this program knows. If the job was scaled meanwhile, call job.apply(), then job.state()"
            )
            self._creation_failed(hosts.number, Failure(kind="invalid", message=reason))

    def _host_ending(self, header: HostEnding, message: MessageReceived) -> None:
        hosts = self._objects.get(header.object)
        if hosts is not None:
            notice = EndingHost(header.host, header.reason, time.monotonic() + header.seconds)
            hosts.ending = {**hosts.ending, header.host: notice}  # a new one: other threads read it

    # --- unsolicited messages

    def _fault(self, header: Fault, message: MessageReceived) -> None:
        self.job_lost = self.job_lost or header.job_lost
        if header.object is not None:
            self._objects.lose_ranks(header.object, header.ranks, header.report)
        if header.object in self.handled_faults:
            return
        failure = failure_of_fault(header)

        def report() -> None:
            if self.marks is not None and header.number:
                self.marks.fault_reported(header.number)
            handle_fault(failure)

        self._fault_thread.call(report)

    def _output(self, header: Output, message: MessageReceived) -> None:
        lines = [line for line in header.lines if line.procs not in self.hidden_procs]
        marks, last = self.marks, header.first + len(header.lines) - 1

        def printed() -> None:
            if marks is not None and header.first:
                marks.printed(last)
            self._consume(message)

        self._printer.put(self.aggregator.take(lines), printed, header.lines)

    def _port_message(self, header: PortMessage, message: MessageReceived) -> None:
        inbox = self.inboxes.get(header.port)
        if inbox is None:
            self._consume(message)
        else:
            if self.marks is not None and header.number:
                self.marks.message_arrived(header.port, header.number)
            inbox.put(message)


def _is_of_creation(call: PendingCall, failure: Failure) -> bool:
    """Whether a call failed because an object could not be created, perhaps its own target."""
    return failure.kind == "step" or (failure.kind == "actor" and isinstance(call, PendingAck))
