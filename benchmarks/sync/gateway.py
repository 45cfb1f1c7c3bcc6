"""A gateway for the benchmarks: the real engine with its code sync and its websocket. Hosts are announced to it instead
of being spawned through Monarch.

``python -m benchmarks.sync.gateway``, with ``$MESHGATE_HOME`` for its store. One JSON object a line. Standard output:
``{"port", "relay", "secret"}``. Standard input: ``{"hosts": {name: [host, port]}, "fanout"?, "stripes"?}``, answered
with ``{"routes": {name: {"control", "stripes"}}}``; ``{"cut": true}``, which resets the laptop's connection;
``{"need": root}``, answered once processes may be started from that version; ``{"left": true}``, answered with the
number of bytes sent to hosts. It ends when its input does.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, cast

import uvloop

from meshgate_gateway.engine.client_connection import serve_connection
from meshgate_gateway.engine.engine import Engine
from meshgate_gateway.engine.monarch.same_versions import SameVersions
from meshgate_gateway.http.auth import prover_of
from meshgate_gateway.http.messages import MAX_HEAD, HeadParser
from meshgate_sync.relay.plan import HostSlot


async def serve() -> None:
    async def no_hosts(mesh: str) -> Any:
        raise LookupError(f"there is no mesh {mesh!r} here")

    no_monarch = cast(Any, SimpleNamespace(same_versions=SameVersions()))
    engine = Engine(no_monarch, no_hosts, lambda up: None)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    accepting = asyncio.ensure_future(_accept(engine, listener))
    distributor = await engine.code.start()
    _say(
        {
            "port": listener.getsockname()[1],
            "relay": distributor.address,
            "secret": engine.code.secret.hex(),
        }
    )
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        request = json.loads(line)
        if "left" in request:
            assert distributor._runner.relay is not None
            _say({"left": distributor._runner.relay.bytes_sent})
            continue
        if "need" in request:
            await engine.code.wait_for_version(request["need"], list(distributor._hosts))
            _say({"need": True})
            continue
        connection = engine.link._connection
        if request.get("cut") and connection is not None and connection._transport is not None:
            connection._transport.abort()
            _say({"cut": True})
            continue
        if "fanout" in request:
            distributor.fanout, distributor.stripes = request["fanout"], request["stripes"]
        routes = distributor.add_hosts([HostSlot(name) for name in request["hosts"]])
        _say({"routes": {name: asdict(route) for name, route in routes.items()}})
    accepting.cancel()
    if not engine.ended.is_set():
        await engine.close("the measurement ended")


async def _accept(engine: Engine, listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while True:
        connection, _ = await loop.sock_accept(listener)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        parser, request = HeadParser(), None
        while request is None:
            request = parser.feed(await loop.sock_recv(connection, MAX_HEAD))
        prover = prover_of(request)
        assert prover is not None, "a client asks for a proof"
        proof = {"gateway": "bench", "proof_key": prover.key}
        await serve_connection(engine.admission, engine.link, connection, request.head, **proof)


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    uvloop.run(serve())
