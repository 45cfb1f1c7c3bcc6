"""Channels: actors send to a port, the laptop receives.

``Channel.open()`` gives a :class:`Port`, which can be passed to endpoints and arrives there as a real Monarch port,
and a :class:`PortReceiver`. A message keeps its share of the channel's credit until the program takes it: a slow
receiver slows the senders and fills no memory.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from meshgate.errors import ActorError, InvalidRequestError, MeshgateError, UnpicklableArgument
from meshgate.future import FutureProxy
from meshgate_wire import MessageReceived
from meshgate_wire.messages import Argument, MeshRef, OpenChannel, PortMessage, PortSend, stream_of

if TYPE_CHECKING:
    from meshgate.client import Client
    from meshgate.objects import RemoteObject

__all__ = ["Channel", "Inbox", "Port", "PortReceiver", "RankedPortReceiver"]

R = TypeVar("R")


class Port(Generic[R]):
    """Where messages of a channel are sent to. They arrive in the order in which they were sent."""

    def __init__(self, client: Client, known: RemoteObject, *, release: bool) -> None:
        self._client = client
        self._known = known
        if release:
            weakref.finalize(self, client.release, known.number).atexit = False

    def send(self, obj: R) -> None:
        """Sends ``obj``, without waiting for anything."""
        pickled = self._client.pickle(obj)
        header = PortSend(port=self._known.number, arguments=pickled.arguments)
        self._client.post(header, (pickled.data, *pickled.buffers), stream=stream_of(self._known.number))

    def exception(self, obj: Exception) -> NoReturn:
        """Actors send exceptions; the laptop cannot."""
        raise InvalidRequestError("an exception can be sent to a port by an actor only: send it as a value")

    def _as_argument(self, client: Client) -> Argument:
        if client is not self._client:
            raise InvalidRequestError("a port can be passed to meshes of its own job only")
        return Argument(kind="port", ref=MeshRef(object=self._known.number))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnpicklableArgument("a port cannot be pickled on its own: pass it as an argument of an endpoint")


class Inbox:
    """What has reached a channel and what is waited for. ``arrived`` is called on the connection thread."""

    def __init__(self, consume: Callable[[MessageReceived], None]) -> None:
        self._consume = consume
        self._lock = threading.Lock()
        self._messages: deque[MessageReceived] = deque()
        self._waiting: deque[tuple[FutureProxy[Any], Callable[[MessageReceived], Any]]] = deque()
        self._error: Callable[[], MeshgateError] | None = None

    def arrived(self, message: MessageReceived) -> None:
        with self._lock:
            if not self._waiting:
                self._messages.append(message)
                return
            future, read = self._waiting.popleft()
        self._give(message, future, read)

    def take(self, future: FutureProxy[Any], read: Callable[[MessageReceived], Any]) -> None:
        """Settles ``future`` with what ``read`` makes of the next message, now or when it comes."""
        with self._lock:
            if not self._messages:
                if self._error is None:
                    self._waiting.append((future, read))
                    return
                message = None
            else:
                message = self._messages.popleft()
        if message is None:
            assert self._error is not None
            future.fail(self._error())
        else:
            self._give(message, future, read)

    def close(self, make_error: Callable[[], MeshgateError]) -> None:
        """Nothing more will come. What has come can still be taken."""
        with self._lock:
            self._error = make_error
            waiting, self._waiting = self._waiting, deque()
        for future, _ in waiting:
            future.fail(make_error())

    def abandon(self, error: MeshgateError) -> None:
        """Fails those who wait, in the child of a fork."""
        self._lock = threading.Lock()
        self._error = lambda: error
        waiting, self._waiting = self._waiting, deque()
        for future, _ in waiting:
            future.abandon(error)

    def _give(self, message: MessageReceived, future: FutureProxy[Any], read: Callable[[MessageReceived], Any]) -> None:
        future.settle(lambda: read(message))
        self._consume(message)


class PortReceiver(Generic[R]):
    """Receives what is sent to the channel's port."""

    def __init__(self, client: Client, known: RemoteObject, inbox: Inbox) -> None:
        self._client = client
        self._known = known
        self._inbox = inbox

    def recv(self) -> FutureProxy[R]:
        """The next message. It is taken when the future is first looked at, not before, as Monarch does."""
        return FutureProxy(begin=lambda future: self._inbox.take(future, self._read))

    def ranked(self) -> RankedPortReceiver[R]:
        """The same receiver, with each message's rank."""
        return RankedPortReceiver(self._client, self._known, self._inbox)

    def _read(self, message: MessageReceived) -> Any:
        header = message.header
        assert isinstance(header, PortMessage)
        reader = self._client.reader
        if not header.exception:
            return reader.value(message.buffers[0], header.objects, "PortReceiver.recv")
        raised = reader.raised(message.buffers[0], header.objects)
        error = ActorError(raised.exception, raised.message)
        error.exception_formatted = raised.exception_formatted
        error.rank = header.rank
        raise error


class RankedPortReceiver(PortReceiver[R]):
    """Receives ``(rank, value)`` pairs."""

    def _read(self, message: MessageReceived) -> Any:
        header = message.header
        assert isinstance(header, PortMessage)
        if header.rank is None:
            raise ValueError("a message without a rank came to a ranked receiver")
        return header.rank, super()._read(message)


class Channel(Generic[R]):
    """Opens channels on the current job's session, or on ``client``."""

    @staticmethod
    def open(once: bool = False, *, client: Client | None = None) -> tuple[Port[Any], PortReceiver[Any]]:
        """A new port and its receiver. With ``once`` it takes a single message."""
        # The client makes channels, a channel asks for the current client: one of the two imports late.
        from meshgate.client import current_client  # noqa: PLC0415

        client = client or current_client()
        known = client.objects.create("port", "", "Channel.open()")
        stream = stream_of(known.number)
        inbox = client.open_inbox(known.number)
        port: Port[Any] = Port(client, known, release=False)
        receiver: PortReceiver[Any] = PortReceiver(client, known, inbox)
        client.post(OpenChannel(object=known.number, once=once), stream=stream)
        weakref.finalize(inbox, client.release, known.number).atexit = False
        return port, receiver

    @staticmethod
    def open_ranked(once: bool = False, *, client: Client | None = None) -> tuple[Port[Any], RankedPortReceiver[Any]]:
        """As :meth:`open`, with a receiver of ``(rank, value)``."""
        port, receiver = Channel.open(once, client=client)
        return port, receiver.ranked()
