"""Ports of channels: actors send to a port, and the laptop receives.

A ``Port`` can be passed to endpoints, where it arrives as a real Monarch port. A message keeps its share of the
channel's credit until the program takes it, so a slow receiver slows the senders and fills no memory.
"""

from __future__ import annotations

import weakref
from typing import Any, Generic, NoReturn, TypeVar

from meshgate.errors import ActorError, InvalidRequestError, UnpicklableArgument
from meshgate.proxies.kept import use_in_call
from meshgate.session.futures import FutureProxy
from meshgate.session.inbox import Inbox
from meshgate.session.objects import RemoteObject
from meshgate.session.session import ClientSession, RemoteReference
from meshgate_wire import MessageReceived
from meshgate_wire.messages import Argument, MeshRef, PortMessage, PortSend, stream_of

R = TypeVar("R")


class Port(RemoteReference, Generic[R]):
    """The sending side of a channel. Messages arrive in the order in which they are sent."""

    return_undeliverable: bool = True
    """Whether a value of ``send`` that cannot be delivered is a fault; otherwise it is dropped.

    As in Monarch, it is not part of the port that an actor receives.
    """

    def __init__(self, session: ClientSession, remote: RemoteObject, *, release: bool) -> None:
        self._session = session
        self._remote = remote
        if release:
            weakref.finalize(self, session.release, remote.number).atexit = False

    def send(self, obj: R) -> None:
        """Sends ``obj``, without waiting for anything.

        A message with kept values comes from the process that keeps the first of them, so that those do not leave the
        cluster. It may overtake messages from elsewhere, or be overtaken; if there is no receiver any more, it is
        dropped.
        """
        pickled = self._session.pickle(obj)
        if pickled.arguments:
            use_in_call(
                self._session, pickled.arguments, None, "a port", stream_of(self._remote.number), answered=False
            )
        header = PortSend(
            port=self._remote.number,
            arguments=pickled.arguments,
            return_undeliverable=self.return_undeliverable,
        )
        self._session.post(header, (pickled.data, *pickled.buffers), stream=stream_of(self._remote.number))

    @property
    def _port_ref(self) -> Port[R]:
        """What ``send`` of ``monarch.actor`` passes to an endpoint."""
        return self

    def exception(self, e: Exception) -> NoReturn:
        """Only actors can send exceptions; here it raises ``InvalidRequestError``."""
        raise InvalidRequestError("only an actor can send an exception to a port: send it as a value")

    def _as_argument(self, session: ClientSession) -> Argument:
        if session is not self._session:
            raise InvalidRequestError(
                "this port belongs to another session, and processes of this one cannot reach it. Nothing was sent. "
                "Open the channel with use_client(job.client), where job is the one whose actors get the port"
            )
        return Argument(kind="port", ref=MeshRef(object=self._remote.number))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnpicklableArgument("a port cannot be pickled on its own: pass it as an argument of an endpoint")


class PortReceiver(Generic[R]):
    """The receiving side of a channel."""

    def __init__(self, session: ClientSession, inbox: Inbox) -> None:
        self._session = session
        self._inbox = inbox

    def recv(self) -> FutureProxy[R]:
        """The next message. It is taken when the future is used, not before.

        A ``get`` that times out or is interrupted, an ``await`` that is cancelled and a future that is dropped take
        none: the next receive gets it. A later use of the same future waits behind the others.

        The future raises an exception that an actor sent with ``port.exception``; if its class cannot be imported
        here, an ``ActorError`` with a stand-in.
        """
        return self._inbox.recv(self._read)

    def ranked(self) -> RankedPortReceiver[R]:
        """The same receiver, with the rank of each message's sender."""
        return RankedPortReceiver(self._session, self._inbox)

    def _read(self, message: MessageReceived) -> Any:
        header = message.header
        assert isinstance(header, PortMessage)
        reader = self._session.reader
        if not header.exception:
            return reader.value(message.buffers[0], header.objects, "PortReceiver.recv")
        raised = reader.raised(message.buffers[0], header.objects)
        if (sent := raised.exception_to_raise()) is not None:
            raise sent
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
            raise ValueError("received a message without a rank on a ranked receiver")
        return header.rank, super()._read(message)
