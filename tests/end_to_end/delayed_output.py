"""A gateway whose workers reach their engine by TCP, as in a cluster: what they print arrives later than their replies.

``python -m tests.end_to_end.delayed_output gateway [ARGUMENT…]``. A relay in each engine delays the connections of its
worker processes by ``$OUTPUT_DELAY`` seconds. What Monarch sends does not pass it.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from meshgate.testing import NetworkProxy


def run_engine() -> int:
    from meshgate_gateway.engine.__main__ import main
    from meshgate_gateway.engine.output import worker_streams
    from meshgate_gateway.engine.output.worker_streams import WorkerStreams

    worker_streams.OUTPUT_TIMEOUT = 60  # results wait for output, however busy the machine is
    listen = WorkerStreams.listen

    async def listen_behind_a_relay(self: Any, host: str | None) -> None:
        await listen(self, "127.0.0.1")
        port = int(self.address.rpartition(":")[2])
        relay = NetworkProxy("127.0.0.1", port, delay=float(os.environ["OUTPUT_DELAY"]))
        relay.__enter__()  # until this process ends
        self.address = f"tcp:127.0.0.1:{relay.port}"

    WorkerStreams.listen = listen_behind_a_relay  # type: ignore[method-assign]
    return main()


def run_gateway() -> None:
    from meshgate_gateway.__main__ import main
    from meshgate_gateway.gateway import Commands

    main(Commands(engine=(sys.executable, "-m", __spec__.name, "engine")))


if __name__ == "__main__":
    program = sys.argv.pop(1)
    sys.exit(run_engine() if program == "engine" else run_gateway())
