"""``python -m meshgate_gateway.engine.reap --hosts JSON``: ends whatever still runs on the given hosts.

The server runs it after an engine died without a word and no other session uses the hosts. A process that was
just being started has no connection to the engine yet, so it would not have noticed; Monarch itself would end it
after a minute or more, or not at all. Nor does stopping the hosts of a dead client: what ends its processes is
a process of our own beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys

from meshgate_gateway.engine import on_worker
from meshgate_gateway.engine.monarch import Binding


async def reap(addresses: list[str], transport: str | None, timeout: float) -> None:
    binding = Binding(transport, on_fault=lambda fault: None)
    hosts = binding.attach("reaped", addresses)
    reaper = binding.spawn_procs(hosts, {"reapers": 1}, "reaper", on_worker.end_siblings)
    await asyncio.wait_for(binding.initialized(reaper), timeout)
    await asyncio.wait_for(binding.stop_procs(reaper, "the hosts are cleared"), timeout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--hosts",
        required=True,
        type=json.loads,
        action="extend",
        help='JSON: ["ipc:///tmp/…", …]; given again for more',
    )
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds")
    options = parser.parse_args()
    addresses = options.hosts
    try:
        asyncio.run(reap(addresses, transport_for(addresses), options.timeout))
    except Exception as error:  # noqa: BLE001 - this process's one job is to say how it went
        print(f"reaping {addresses} failed: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # Monarch's own shutdown would take seconds more


def transport_for(addresses: list[str]) -> str | None:
    """The transport that hosts at ``addresses`` can answer: unix sockets among themselves, else this pod's address."""
    if all("ipc://" in address for address in addresses):
        return None
    return f"tcp://{os.environ.get('MESHGATE_ENGINE_HOST', '127.0.0.1')}:0"


if __name__ == "__main__":
    sys.exit(main())
