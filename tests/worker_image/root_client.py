"""A Monarch root client as a process.

It attaches to the hosts in its arguments, spawns an actor in two processes on each, prints their pids, then runs the
commands ``start``, ``call`` and ``shutdown``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from monarch.actor import Actor, attach_to_workers, endpoint

from meshgate_worker.host import service_address


class Probe(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def start(self) -> int:
        """Starts a process in a session of its own."""
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid


def reply(answer: object) -> None:
    print(json.dumps(answer), flush=True)


def main() -> None:
    identity, *addresses = sys.argv[1:]
    workers = [service_address(address, identity) for address in addresses]
    hosts = attach_to_workers(ca="trust_all_connections", workers=workers)
    hosts.initialized.get()
    probes = hosts.spawn_procs(per_host={"procs": 2}).spawn("probe", Probe)
    reply([pid for _, pid in probes.pid.call().get().items()])
    for line in sys.stdin:
        if line == "start\n":
            reply([pid for _, pid in probes.start.call().get().items()])
        elif line == "call\n":
            reply([pid for _, pid in probes.pid.call().get().items()])
        elif line == "shutdown\n":
            hosts.shutdown().get()
            reply("done")
    os._exit(0)


if __name__ == "__main__":
    main()
