"""Where each message of the gateway goes. Runs on the connection thread and never blocks it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

from meshgate.calls import Acknowledgement, Answer, Calls, Reader
from meshgate.channel import Inbox
from meshgate.errors import InvalidRequestError, MeshgateError
from meshgate.failures import failure_of_fault, from_failure
from meshgate.faults import fault_hook
from meshgate.objects import Objects
from meshgate.output import OutputPrinter
from meshgate.serial import SerialThread
from meshgate_wire import Fragments, Header, MessageReceived, MessageTooLarge
from meshgate_wire.messages import (
    Done,
    Failed,
    Failure,
    Fault,
    HostsAttached,
    Item,
    ObjectFailed,
    Output,
    OutputLine,
    PortMessage,
    Sync,
    Values,
)

__all__ = ["Dispatch", "step_failure"]

log = logging.getLogger("meshgate.dispatch")


class Dispatch:
    """The connection's ``Handler``. ``consume`` gives a message's credit back to the gateway, ``release`` tells it
    that nobody holds an object."""

    def __init__(
        self,
        objects: Objects,
        calls: Calls,
        reader: Reader,
        consume: Callable[[MessageReceived], None],
        release: Callable[[int], None],
    ) -> None:
        self.inboxes: WeakValueDictionary[int, Inbox] = WeakValueDictionary()
        self._printer = OutputPrinter()
        self._faults = SerialThread("meshgate-faults")
        self.sync: Callable[[Sync, Sequence[Fragments]], None] = lambda header, buffers: None
        self.hidden: set[int] = set()  # proc meshes whose output is not shown
        self._objects = objects
        self._calls = calls
        self._reader = reader
        self._consume = consume
        self._release = release
        self._handlers: dict[type, Callable[[Any, MessageReceived], None]] = {
            Values: self._values,
            Item: self._item,
            Done: self._done,
            Failed: self._failed,
            ObjectFailed: self._object_failed,
            HostsAttached: self._hosts_attached,
            Fault: self._fault,
            Output: self._output,
            PortMessage: self._port_message,
            Sync: lambda header, message: self.sync(header, message.buffers),
        }

    def close(self, timeout: float) -> None:
        """Waits until all output is printed and all faults are told, ``timeout`` seconds at most for each."""
        self._printer.close(timeout)
        self._faults.close(timeout)

    # --- Handler

    def received(self, message: MessageReceived) -> None:
        header = message.header
        handler = self._handlers.get(type(header))
        if handler is None:
            log.debug("a %s message has no meaning here", type(header).__name__)
        else:
            try:
                handler(header, message)
            except Exception as error:
                log.exception("%s of the gateway makes no sense", type(header).__name__)
                self._end_badly(getattr(header, "call", None), error)
        if not isinstance(header, (Output, PortMessage)):
            self._consume(message)

    def unsendable(self, header: Header, error: MessageTooLarge) -> None:
        failure = Failure(kind="invalid", message=f"{type(header).__name__} was not sent: {error}")
        number = getattr(header, "object", None)
        if number is not None:
            self._creation_failed(number, failure)
        self._end(getattr(header, "call", None), lambda: InvalidRequestError(failure.message))

    def over(self, error: MeshgateError) -> None:
        for answer in self._calls.end_where(lambda _: True):
            answer.fail(lambda: error)
        for inbox in list(self.inboxes.values()):
            inbox.close(lambda: error)

    def forked(self, error: MeshgateError) -> None:
        """As ``over``, in the child of a fork: no lock can be trusted."""
        for answer in self._calls.end_where(lambda _: True):
            for future in answer.pending():
                future.abandon(error)
        for inbox in list(self.inboxes.values()):
            inbox.abandon(error)

    # --- messages

    def _values(self, header: Values, message: MessageReceived) -> None:
        answer = self._calls.get(header.call)
        if answer is not None:
            answer.values(self._reader, header, message.buffers)
            self._calls.end(header.call)

    def _item(self, header: Item, message: MessageReceived) -> None:
        answer = self._calls.get(header.call)
        if answer is not None and answer.item(self._reader, header, message.buffers):
            self._calls.end(header.call)

    def _done(self, header: Done, message: MessageReceived) -> None:
        answer = self._calls.end(header.call)
        if isinstance(answer, Acknowledgement):
            answer.done()

    def _failed(self, header: Failed, message: MessageReceived) -> None:
        answer = self._calls.get(header.call)
        if answer is not None and answer.failed(self._reader, header, message.buffers):
            self._calls.end(header.call)

    def _object_failed(self, header: ObjectFailed, message: MessageReceived) -> None:
        self._creation_failed(header.object, header.failure)

    def _creation_failed(self, number: int, failure: Failure) -> None:
        dropped = self._objects.failed(number, failure)
        for answer in self._calls.end_where(lambda answer: self._objects.stands_on(answer.target, number)):
            answer.fail(step_failure(self._objects, answer.target, answer.endpoint, failure))
        for each in dropped:
            self._release(each)

    def _hosts_attached(self, header: HostsAttached, message: MessageReceived) -> None:
        known = self._objects.get(header.object)
        if known is None:
            return
        if known.hosts:
            self._objects.returned[known.name] = self._objects.returned.get(known.name, 0) + 1
        known.hosts = header.hosts
        if len(header.hosts) != known.expected_hosts:
            reason = f"mesh {known.name!r} has {len(header.hosts)} hosts, the job says {known.expected_hosts}"
            self._creation_failed(known.number, Failure(kind="invalid", message=reason))

    def _fault(self, header: Fault, message: MessageReceived) -> None:
        failure = failure_of_fault(header)
        self._faults.call(lambda: fault_hook()(failure))

    def _output(self, header: Output, message: MessageReceived) -> None:
        lines = [line for line in header.lines if self._is_shown(line)] if self.hidden else header.lines
        self._printer.put(lines, lambda: self._consume(message))

    def _is_shown(self, line: OutputLine) -> bool:
        printed_by = self._objects.named(line.mesh)
        return not any(self._objects.stands_on(number, hidden) for number in printed_by for hidden in self.hidden)

    def _port_message(self, header: PortMessage, message: MessageReceived) -> None:
        inbox = self.inboxes.get(header.port)
        if inbox is None:
            self._consume(message)
        else:
            inbox.arrived(message)

    # --- ends

    def _end(self, call: int | None, make_error: Callable[[], MeshgateError]) -> None:
        answer: Answer | None = self._calls.end(call) if call is not None else None
        if answer is not None:
            answer.fail(make_error)

    def _end_badly(self, call: int | None, error: Exception) -> None:
        failure = Failure(kind="internal", message=f"the gateway's answer makes no sense here: {error!r}")
        self._end(call, lambda: from_failure(failure))


def step_failure(
    objects: Objects, number: int, endpoint: str, reason: Failure | None = None
) -> Callable[[], MeshgateError]:
    """How to make the error of ``endpoint``, which cannot run because of what ``number`` stands on.

    ``reason`` is why, where ``number`` may have been released.
    """
    found = objects.trouble(number)
    known, failure = found if found is not None else (None, reason)
    assert failure is not None
    if (known is not None and known.stopped and known.failure is None) or failure.kind == "step":
        return lambda: from_failure(failure, endpoint=endpoint)
    as_step = failure.model_copy(update={"kind": "step", "step": failure.step or (known.step if known else "")})
    return lambda: from_failure(as_step, endpoint=endpoint, cause=from_failure(failure))
