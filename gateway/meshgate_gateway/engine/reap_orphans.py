"""``python -m meshgate_gateway.engine.reap_orphans --hosts JSON``: kills what a dead engine left on its hosts.

The server runs this after an engine died without stopping its meshes, if no other session uses the hosts. Processes
that are connected to the engine end by themselves, but one that was still starting is not connected. Monarch ends it
after a minute or more, or not at all, and stopping the hosts of a dead client does not help either. So a process
spawned on each host kills the others there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys

import async_timeout

from meshgate_gateway.engine.monarch import interface
from meshgate_gateway.engine.on_worker.process import kill_siblings
from meshgate_wire.messages import Host


async def reap_orphans(hosts: list[Host], transport: str | None, timeout: float) -> None:
    monarch = interface.connect(transport, on_fault=lambda fault: None)
    procs = monarch.spawn_procs(monarch.attach("orphans", hosts), {"killers": 1}, "killers", kill_siblings)
    async with async_timeout.timeout(timeout):
        await monarch.wait_initialized(procs)
    async with async_timeout.timeout(timeout):
        await monarch.stop_procs(procs, "the orphans are gone")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--hosts",
        required=True,
        type=json.loads,
        action="extend",
        help='JSON list of hosts, such as [{"name": "workers-0", "address": "ipc:///tmp/…"}]; repeatable',
    )
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds")
    options = parser.parse_args()
    hosts = [Host.model_validate(each) for each in options.hosts]
    addresses = [host.address for host in hosts]
    try:
        asyncio.run(reap_orphans(hosts, transport_for(addresses), options.timeout))
    except Exception as error:  # noqa: BLE001 - every failure goes to the server's log
        print(f"cannot kill orphans on {addresses}: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # Monarch's own shutdown would take seconds


def transport_for(addresses: list[str]) -> str | None:
    """The transport on which hosts at ``addresses`` can reply: unix sockets, or else this pod's address."""
    if all("ipc://" in address for address in addresses):
        return None
    return interface.transport_at(os.environ.get("MESHGATE_ENGINE_HOST", "127.0.0.1"))


if __name__ == "__main__":
    sys.exit(main())
