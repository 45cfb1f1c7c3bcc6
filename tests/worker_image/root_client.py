"""A Monarch root client as a process: attaches to the hosts named by its arguments, spawns an actor in two processes
on each, says which processes those are, then obeys: ``call``, ``shell``, ``shutdown``."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from monarch.actor import Actor, attach_to_workers, endpoint


class Probe(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def start(self) -> int:
        """A process that leaves the session, as launchers of servers do."""
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid


def say(answer: object) -> None:
    print(json.dumps(answer), flush=True)


def main() -> None:
    hosts = attach_to_workers(ca="trust_all_connections", workers=sys.argv[1:])
    hosts.initialized.get()
    probes = hosts.spawn_procs(per_host={"procs": 2}).spawn("probe", Probe)
    say([pid for _, pid in probes.pid.call().get().items()])
    for line in sys.stdin:
        if line == "start\n":
            say([pid for _, pid in probes.start.call().get().items()])
        elif line == "call\n":
            say([pid for _, pid in probes.pid.call().get().items()])
        elif line == "shutdown\n":
            hosts.shutdown().get()
            say("done")
    os._exit(0)


if __name__ == "__main__":
    main()
