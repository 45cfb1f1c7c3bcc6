"""Opens channels from actors to the laptop."""

from __future__ import annotations

import weakref
from typing import Any, Generic, cast

from typing_extensions import TypeVar

from meshgate.actors import api
from meshgate.monarch_classes import monarch_api
from meshgate.proxies.client import Client, current_client
from meshgate.proxies.mesh import require_name
from meshgate.proxies.ports import Port, PortReceiver, RankedPortReceiver
from meshgate_wire.messages import OpenChannel, stream_of

R = TypeVar("R", default=Any)


class Channel(Generic[R]):
    """Opens channels on the current job's session, or on ``client``."""

    @staticmethod
    def open(once: bool = False, *, client: Client | None = None, name: str = "") -> tuple[Port[R], PortReceiver[R]]:
        """A new port and its receiver. With ``once`` it takes a single message. Inside an actor they are Monarch's.

        A channel without a name is closed when the program drops the receiver. One with a ``name`` stays open until the
        session ends, and another process finds it with ``job.attach()``. Raises ValueError if the name is taken.
        """
        if client is None and api.inside_actor():
            return cast("tuple[Port[R], PortReceiver[R]]", _monarchs_channel().open(once))
        client = client or current_client()
        if name:
            require_name(name)
        remote = client.objects.create("port", name, "Channel.open()")
        inbox = client.open_inbox(remote.number, name)
        port: Port[Any] = Port(client, remote, release=False)
        receiver: PortReceiver[Any] = PortReceiver(client, inbox)
        client.post(OpenChannel(object=remote.number, once=once, name=name), stream=stream_of(remote.number))
        if not name:
            weakref.finalize(inbox, client.release, remote.number).atexit = False
        return port, receiver

    @staticmethod
    def open_ranked(
        once: bool = False, *, client: Client | None = None, name: str = ""
    ) -> tuple[Port[R], RankedPortReceiver[R]]:
        """As ``open``, with a receiver of ``(rank, value)`` pairs."""
        if client is None and api.inside_actor():
            return cast("tuple[Port[R], RankedPortReceiver[R]]", _monarchs_channel().open_ranked(once))
        port, receiver = Channel[R].open(once, client=client, name=name)
        return port, receiver.ranked()


def _monarchs_channel() -> Any:
    return monarch_api()["Channel"]
