"""The workers of a Slurm job, each of which connects to the gateway for as long as it runs.

A worker sends one line of JSON: the job's secret, its rank and node, and the address of its Monarch host. The end of
its connection is the end of the worker, seen at once, however it ends; only a node that loses its power is silent.
The supervisor keeps a copy of each connection, so that the workers outlive this server.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshgate_gateway.hosts.provider import Host
from meshgate_gateway.supervisor.supervisor import Kept

log = structlog.get_logger()

KEPT = "slurm worker "  # begins the keys of what the supervisor keeps of them
MAX_LINE = 4096
REGISTRATION_TIMEOUT = 10.0
MAX_PENDING = 1024  # connections that have not registered yet


class Registration(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    secret: str = Field(max_length=256)
    rank: int = Field(ge=0)
    node: str = Field(min_length=1, max_length=255)
    address: str = Field(min_length=1, max_length=512)
    identity: str = Field(max_length=64)
    python: str = Field(default="", max_length=64)
    monarch: str = Field(default="", max_length=64)


class Keeper(Protocol):
    """What the workers need of the supervisor."""

    @property
    def kept(self) -> Mapping[str, Kept]: ...

    def keep(self, key: str, note: dict[str, Any], descriptors: Sequence[int] = ()) -> None: ...


@dataclass(slots=True)
class Worker:
    """A worker that has registered. ``lost``: why it cannot be used any more."""

    rank: int
    host: Host
    connected: bool = True
    lost: str | None = None

    @property
    def key(self) -> str:
        return f"{KEPT}{self.rank}"

    def note(self) -> dict[str, Any]:
        return {"rank": self.rank, "host": self.host.model_dump(), "lost": self.lost}


class Workers:
    """The workers by rank. ``changed()`` is called when one has registered, ``gone(worker)`` when one has ended."""

    def __init__(
        self, count: int, secret: str, keeper: Keeper, *, changed: Callable[[], None], gone: Callable[[Worker], None]
    ) -> None:
        self.by_rank: dict[int, Worker] = {}
        self._keeper = keeper
        self._tasks: set[asyncio.Task[None]] = set()
        self._count, self._secret = count, secret
        self._changed, self._gone = changed, gone
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self._unregistered = 0

    async def listen(self, listener: socket.socket) -> None:
        """Accepts workers on the listening socket, and takes over those of an earlier server."""
        for key, kept in self._keeper.kept.items():
            if key.startswith(KEPT):
                await self._adopt(kept)
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=MAX_LINE)

    async def close(self) -> None:
        """Ends every connection, and with it every worker."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close()

    def record_loss(self, worker: Worker, reason: str) -> None:
        """The worker cannot be used any more, in a further server neither."""
        worker.lost = reason
        self._keeper.keep(worker.key, worker.note())

    async def _adopt(self, kept: Kept) -> None:
        host = Host.model_validate(kept.note["host"])
        worker = self.by_rank[kept.note["rank"]] = Worker(kept.note["rank"], host, lost=kept.note["lost"])
        if not kept.descriptors:
            worker.connected = False
            return
        reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=kept.descriptors[0]), limit=MAX_LINE)
        self._connections.add(writer)
        task = asyncio.create_task(self._wait_gone(worker, reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wait_gone(self, worker: Worker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readline():
                pass
        except (OSError, ValueError) as error:
            log.debug("worker connection failed", reason=str(error))
        finally:
            self._connections.discard(writer)
            writer.close()
            worker.connected = False
            self._gone(worker)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._unregistered >= MAX_PENDING:
            writer.close()
            return
        self._connections.add(writer)
        self._unregistered += 1
        registered: Worker | None = None
        try:
            registered = await self._register(reader, writer)
        except (OSError, asyncio.TimeoutError, ValueError) as error:
            log.debug("worker did not register", reason=str(error) or type(error).__name__)
        finally:
            self._unregistered -= 1
            if registered is None:
                self._connections.discard(writer)
                writer.close()
        if registered is not None:
            await self._wait_gone(registered, reader, writer)

    async def _register(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Worker | None:
        line = await asyncio.wait_for(reader.readline(), REGISTRATION_TIMEOUT)
        try:
            registration = Registration.model_validate_json(line)
        except ValidationError as error:
            problem = f"invalid registration: {error.errors(include_url=False)[0]['msg']}"
        else:
            problem = self._refuse(registration)
        if problem:
            peer = (writer.get_extra_info("peername") or ("?",))[0]
            log.warning("worker refused", reason=problem, peer=peer)
            writer.write(json.dumps({"error": problem}).encode() + b"\n")
            await writer.drain()
            return None
        host = Host(
            name=registration.node,
            address=registration.address,
            identity=registration.identity,
            node=registration.node,
            python=registration.python,
            monarch=registration.monarch,
        )
        worker = self.by_rank[registration.rank] = Worker(registration.rank, host)
        self._keeper.keep(worker.key, worker.note(), [writer.get_extra_info("socket").fileno()])
        writer.write(b'{"ok": true}\n')
        await writer.drain()
        log.info("worker connected", rank=worker.rank, node=host.name, address=host.address)
        self._changed()
        return worker

    def _refuse(self, registration: Registration) -> str:
        """Why the worker cannot join; "" if it can."""
        if not hmac.compare_digest(registration.secret.encode(), self._secret.encode()):
            return "the secret is not that of this job"
        if registration.rank >= self._count:
            return f"rank {registration.rank} is not one of the job's {self._count}"
        known = self.by_rank.get(registration.rank)
        if known is not None:
            return f"rank {registration.rank} is already taken, by the worker on {known.host.name}"
        return ""
