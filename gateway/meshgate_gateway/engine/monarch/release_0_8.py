"""Monarch 0.8: what differs from 0.7.

- Hosts are attached to by identity: ``<identity>@<address>``.
- A port's receiver decodes messages itself, on threads of Monarch's own, and keeps the rank of an exception to itself.
  A port with an accumulator (``Mailbox.open_accum_port``) passes each message to it undecoded, rank included.
- Telemetry samples hosts and GPUs.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

from meshgate_gateway.engine.monarch import release_0_7
from meshgate_gateway.engine.monarch.interface import Monarch, OnFault
from meshgate_gateway.engine.monarch.release_0_7 import Messages
from meshgate_gateway.engine.monarch.telemetry import Collector
from meshgate_wire.messages import Host

DRAIN_EVERY = 1024  # messages


def attach_natively(name: str, hosts: Sequence[Host], transport: str | None) -> Any:
    """As that of 0.7."""
    return release_0_7.attach_natively(name, hosts, transport, service_address)


def service_address(host: Host) -> str:
    from monarch._src.job import service_identity  # noqa: PLC0415 - loaded once Monarch is

    try:
        identity = service_identity.service_proc_id_from_uuid(str(uuid.UUID(host.identity)))
    except ValueError:
        identity = host.identity
    if not identity:
        raise ValueError(
            f"worker {host.name} ({host.address}) has no identity, by which torchmonarch 0.8 attaches: give its "
            "address as IDENTITY@ADDRESS"
        )
    return f"{identity}@{host.address}"


class Client(release_0_7.Client):
    """Implements ``interface.Monarch``, which documents the methods."""

    def __init__(self, transport: str | None, on_fault: OnFault) -> None:
        super().__init__(transport, on_fault)
        self._loop = asyncio.get_running_loop()

    def _service_address(self, host: Host) -> str:
        return service_address(host)

    def collector(self, retention: int, host_metrics: float, gpu_metrics: float) -> Collector:
        self._collects = True
        return Collector(self._instance, retention, host_metrics, gpu_metrics)

    def open_port(self) -> tuple[Any, Any]:
        messages = Messages(self._loop, self._no_state)
        handle, native = self._ports.open_accum_port(messages)
        return handle.bind(), Receiver(messages, native)

    def _reply_port(self, several: bool, explicit_port: bool) -> tuple[Any, Any]:
        return self._open_port_for_several() if several else self.open_port()

    def receive(self, receiver: Receiver) -> asyncio.Future[Any]:
        return receiver.next_message()

    def close(self, receiver: Receiver) -> None:
        """Nothing waits that has the port."""


class Receiver:
    """Receives a port's messages. The port closes when this is dropped."""

    def __init__(self, messages: Messages, native: Any) -> None:
        self._messages, self._native = messages, native
        self._received = 0
        self._draining: Any = None

    def next_message(self) -> asyncio.Future[Any]:
        """A future of the next message. One at a time; a message that a cancelled one did not take stays."""
        self._received += 1
        if self._received % DRAIN_EVERY == 0:  # Monarch queues the state once for each message; this takes them all
            self._draining = self._native.recv(False).spawn_handle()
        return self._messages.next()


_implements: type[Monarch] = Client
