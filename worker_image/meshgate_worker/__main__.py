"""``python -m meshgate_worker --address ipc://path --name workers-0``: runs one Monarch host."""

from __future__ import annotations

import argparse
import os
import sys

from meshgate_worker.host import HostOptions, serve


def _options(arguments: list[str]) -> HostOptions:
    parser = argparse.ArgumentParser(prog="meshgate_worker", description="Runs one Monarch host.")
    parser.add_argument(
        "--address",
        default=os.environ.get("MESHGATE_WORKER_ADDRESS"),
        help="where Monarch reaches this host: ipc://PATH, tcp://HOST:PORT or "
        "tcp://$POD_IP:26600@tcp://0.0.0.0:26600; variables are expanded (MESHGATE_WORKER_ADDRESS)",
    )
    parser.add_argument("--name", default="worker", help="what logs call this host (default: worker)")
    parser.add_argument("--lifetime-fd", type=int, help="end when this descriptor reaches end of file")
    parser.add_argument("--ready-fd", type=int, help="write one line of JSON here when ready to be attached to")
    parser.add_argument("--remove-directory", action="store_true", help="remove the socket's directory at the end")
    parser.add_argument("--grace", type=float, default=2.0, help="seconds from SIGTERM to SIGKILL (default: 2)")
    given = parser.parse_args(arguments)
    if not given.address:
        parser.error("--address is required: say where Monarch reaches this host")
    return HostOptions(
        address=os.path.expandvars(given.address),
        name=given.name,
        lifetime_fd=given.lifetime_fd,
        ready_fd=given.ready_fd,
        grace=given.grace,
        remove_directory=given.remove_directory,
    )


def main() -> None:
    code = serve(_options(sys.argv[1:]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Monarch's threads do not survive an orderly interpreter shutdown


if __name__ == "__main__":
    main()
