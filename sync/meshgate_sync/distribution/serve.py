"""A host's relay as a process of its own: ``python -m meshgate_sync.distribution.serve``.

One JSON object a line. Standard input: first ``{"name", "secret" (hex), "owner", "home"?, "bind"?, "port"?,
"advertise"?}``, then ``{"routes": {"control": [...], "stripes": [[...]]}, "addresses": {name: [host, port]}}``.
Standard output: ``{"address": [host, port], "home": ...}``, then ``{"configured": true}``. The process ends at the end
of its input.

Imports nothing but the standard library.
"""

from __future__ import annotations

import json
import sys
from typing import Any, TextIO

from ..relay.plan import Routes
from .agent import HostAgent


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
