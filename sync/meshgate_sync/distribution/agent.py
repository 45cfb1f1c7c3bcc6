"""A host's relay as something to start and stop: a thread with an event loop of its own.

It runs inside an actor that the engine spawns on the host, or in a process of its own (``main``).

Imports nothing but the standard library.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import os
import sys
import threading
from collections.abc import Coroutine, Mapping
from typing import Any, TextIO, TypeVar

from ..relay.commands import Timeouts
from ..relay.plan import Routes
from ..store.home import default_home
from ..store.store import Store
from ..transport.runner import Address, Runner

_T = TypeVar("_T")
_CALL_TIMEOUT = 60.0
VARIABLE = "MESHGATE_LOG_LEVEL"
"""The gateway's own setting of its log level."""

_PACKAGE = __name__.rpartition(".distribution.")[0]  # on hosts the package may be loaded under another name


def enable_debug_log() -> None:
    """If the environment variable MESHGATE_LOG_LEVEL is ``debug``, logs what relays do, to stderr unless the process
    has configured its logging. Idempotent."""
    if os.environ.get(VARIABLE, "").lower() != "debug":
        return
    log = logging.getLogger(_PACKAGE)
    log.setLevel(logging.DEBUG)
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        log.addHandler(handler)


class HostAgent:
    """Opens the store in ``home`` and listens on ``bind``. ``address`` is where others reach it: ``advertise`` (the
    pod's IP), if given, and the bound port. Takes part once ``configure`` is called. Thread-safe.

    Raises StoreError if the store cannot be opened, OSError if the address cannot be bound.
    """

    def __init__(
        self, name: str, *, secret: bytes, owner: str, home: str | None = None, bind: str = "127.0.0.1",
        port: int = 0, advertise: str | None = None, timeouts: Timeouts | None = None,
    ) -> None:  # fmt: skip
        enable_debug_log()
        self.name = name
        self.home = home or default_home()
        self._owner = owner
        self._store = Store(self.home)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="meshgate-relay", daemon=True)
        self._thread.start()
        self._runner = Runner(name, self._store, secret=secret, owner=owner, timeouts=timeouts)
        try:
            host, bound = self._call(self._runner.listen(bind, port))
        except BaseException:
            self.stop()
            raise
        self.address: Address = (advertise or host, bound)

    def configure(self, routes: Routes, addresses: Mapping[str, Address]) -> None:
        """The parents of this host and their addresses; the gateway's name is ``plan.GATEWAY``. Call once."""
        self._call(self._configure(routes, dict(addresses)))

    async def _configure(self, routes: Routes, addresses: Mapping[str, Address]) -> None:
        self._runner.configure(routes, addresses)

    def restarted(self, addresses: Mapping[str, Address]) -> None:
        """Hosts that had ended are back, at these addresses. Lanes that prefer them return to them."""
        self._call(self._restarted(dict(addresses)))

    async def _restarted(self, addresses: Mapping[str, Address]) -> None:
        self._runner.restarted(addresses)

    def stop(self) -> None:
        """Ends the relay and closes the store; versions stay on disk. Idempotent."""
        if self._loop.is_closed():
            return
        self._call(self._runner.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._store.snapshots.release(self._owner)
        self._store.close()

    def _call(self, step: Coroutine[Any, Any, _T]) -> _T:
        future: concurrent.futures.Future[_T] = asyncio.run_coroutine_threadsafe(step, self._loop)
        return future.result(_CALL_TIMEOUT)


# A host's relay as a process of its own: ``python -m meshgate_sync.distribution.agent``.
#
# One JSON object a line. Standard input: first ``{"name", "secret" (hex), "owner", "home"?, "bind"?, "port"?,
# "advertise"?}``, then ``{"routes": {"control": [...], "stripes": [[...]]}, "addresses": {name: [host, port]}}``.
# Standard output: ``{"address": [host, port], "home": ...}``, then ``{"configured": true}``. The process ends at the
# end of its input.


def main(source: TextIO, sink: TextIO) -> None:
    first = json.loads(source.readline())
    agent = HostAgent(
        first["name"],
        secret=bytes.fromhex(first["secret"]),
        owner=first["owner"],
        home=first.get("home"),
        bind=first.get("bind", "127.0.0.1"),
        port=first.get("port", 0),
        advertise=first.get("advertise"),
    )
    try:
        _write_line(sink, {"address": agent.address, "home": agent.home})
        for line in source:
            configuration = json.loads(line)
            routes = configuration["routes"]
            agent.configure(
                Routes(tuple(routes["control"]), tuple(tuple(route) for route in routes["stripes"])),
                {name: (host, port) for name, (host, port) in configuration["addresses"].items()},
            )
            _write_line(sink, {"configured": True})
    finally:
        agent.stop()


def _write_line(sink: TextIO, message: dict[str, Any]) -> None:
    sink.write(json.dumps(message) + "\n")
    sink.flush()


if __name__ == "__main__":
    main(sys.stdin, sys.stdout)
