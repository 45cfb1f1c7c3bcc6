"""A port-forward in a websocket. Messages begin with a channel number: 0 for bytes of the port, 1 for an error."""

from __future__ import annotations

from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.protocol import OPEN, Event
from websockets.typing import Subprotocol

from meshgate.jobs.kubernetes.port_forward.local_end import ForwardFailed, LocalEnd
from meshgate_kubernetes.api.client import PortForwardRequest

CLOSE_TIMEOUT = 1.0
_SUBPROTOCOL = Subprotocol("v4.channel.k8s.io")
_DATA, _ERROR = 0, 1


async def connect_websocket(request: PortForwardRequest, local: LocalEnd) -> WebsocketEnd:
    """Raises InvalidStatus if the API server rejects it, and OSError."""

    def create(protocol: ClientProtocol, **options: Any) -> WebsocketEnd:
        return WebsocketEnd(protocol, local=local, **options)

    options: dict[str, Any] = {"proxy": request.proxy}
    if request.ssl is not None:
        options["ssl"] = request.ssl
    if request.server_hostname is not None:
        options["server_hostname"] = request.server_hostname
    remote = await connect(
        request.url,
        additional_headers=dict(request.headers),
        subprotocols=[_SUBPROTOCOL],
        compression=None,
        max_size=None,
        open_timeout=None,
        ping_interval=None,  # the forwarded connection has its own pings
        close_timeout=CLOSE_TIMEOUT,
        create_connection=create,  # type: ignore[arg-type]  # called, never subclassed
        **options,
    )
    assert isinstance(remote, WebsocketEnd)
    return remote


class WebsocketEnd(ClientConnection):
    """The API server's websocket. Passes frames to the local end in the callback that reads them."""

    def __init__(self, protocol: ClientProtocol, *, local: LocalEnd, **options: Any) -> None:
        super().__init__(protocol, **options)
        self._local = local
        self._channel = _DATA
        self._channels_seen: set[int] = set()

    def process_event(self, event: Event) -> None:
        if self.response is None or not isinstance(event, Frame):
            super().process_event(event)
        elif event.opcode is Opcode.BINARY:
            data = memoryview(event.data)
            self._channel = data[0]
            self._received(data[1:])
        elif event.opcode is Opcode.CONT:
            self._received(memoryview(event.data))
        else:
            super().process_event(event)

    def _received(self, data: memoryview) -> None:
        if self._channel not in self._channels_seen:  # each channel begins with the port number, two bytes
            self._channels_seen.add(self._channel)
            data = data[2:]
        if not data:
            return
        if self._channel == _DATA:
            self._local.write(data)
        elif self._channel == _ERROR:
            self._local.end(ForwardFailed(f"the port-forward ended: {bytes(data).decode(errors='replace').strip()}"))

    def forward(self, data: memoryview) -> None:
        if self.protocol.state is OPEN:
            self.protocol.send_binary(b"\0" + data)
            self.send_data()

    def pause_receiving(self) -> None:
        self.transport.pause_reading()

    def resume_receiving(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._local.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._local.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._local.end(None)
