"""``python -m meshgate_worker --address ipc://path --name workers-0``: runs one Monarch host."""

from __future__ import annotations

import argparse
import os
import sys
import uuid

from meshgate_worker.host import HostOptions, serve


def _options(arguments: list[str]) -> HostOptions:
    parser = argparse.ArgumentParser(prog="meshgate_worker", description="Runs one Monarch host.")
    parser.add_argument(
        "--address",
        default=os.environ.get("MESHGATE_WORKER_ADDRESS"),
        help="address at which Monarch reaches this host: ipc://PATH, tcp://HOST:PORT or "
        "tcp://$POD_IP:26600@tcp://0.0.0.0:26600; variables are expanded (MESHGATE_WORKER_ADDRESS)",
    )
    parser.add_argument("--name", default="worker", help="name of this host in logs (default: worker)")
    parser.add_argument(
        "--identity",
        default=os.environ.get("MONARCH_POD_UID"),
        help="UUID from which Monarch 0.8 and later derive this host's service identity (MONARCH_POD_UID)",
    )
    parser.add_argument("--cookie", help="marks the processes of this host; random by default")
    parser.add_argument("--lifetime-fd", type=int, help="exit when this file descriptor reaches end of file")
    parser.add_argument("--ready-fd", type=int, help="file descriptor to write one line of JSON to once ready")
    parser.add_argument("--remove-directory", action="store_true", help="remove the socket's directory on exit")
    parser.add_argument("--grace", type=float, default=2.0, help="seconds from SIGTERM to SIGKILL (default: 2)")
    parser.add_argument(
        "--notice",
        type=float,
        default=os.environ.get("MESHGATE_WORKER_NOTICE", "0"),
        help="seconds for which processes of this host may go on after SIGTERM to it, such as those of a pod's grace "
        "period; it ends once none is left (MESHGATE_WORKER_NOTICE; default: 0)",
    )
    options = parser.parse_args(arguments)
    if not options.address:
        parser.error("no address: set --address or MESHGATE_WORKER_ADDRESS")
    return HostOptions(
        address=os.path.expandvars(options.address),
        name=options.name,
        identity=options.identity,
        cookie=options.cookie or uuid.uuid4().hex,
        lifetime_fd=options.lifetime_fd,
        ready_fd=options.ready_fd,
        grace=options.grace,
        notice=options.notice,
        remove_directory=options.remove_directory,
    )


def main() -> None:
    code = serve(_options(sys.argv[1:]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Monarch's threads do not survive an orderly interpreter shutdown


if __name__ == "__main__":
    main()
