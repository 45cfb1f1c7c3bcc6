"""Runs a ``NetworkProxy`` as a process: ``python -m meshgate.testing HOST:PORT --delay SECONDS --rate BYTES``.

It prints the port it listens on, and runs until it is interrupted or terminated.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading

from .network_proxy import NetworkProxy


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m meshgate.testing", description="Forward TCP as a slow link does.")
    parser.add_argument("target", help="host:port to forward to")
    parser.add_argument("--delay", type=float, default=0.0, help="latency to add in each direction, in seconds")
    parser.add_argument(
        "--rate", type=float, default=0.0, help="bytes a second that may pass in each direction; 0: any"
    )
    options = parser.parse_args()
    host, _, port = options.target.rpartition(":")
    with (
        NetworkProxy(host, int(port), delay=options.delay, rate=options.rate) as proxy,
        contextlib.suppress(KeyboardInterrupt),
    ):
        sys.stdout.write(f"{proxy.port}\n")
        sys.stdout.flush()
        threading.Event().wait()


if __name__ == "__main__":
    main()
