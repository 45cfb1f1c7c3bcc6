"""One worker host as a process, and a real Monarch root client as another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

DEADLINE = 60.0
CLIENT = Path(__file__).parent / "root_client.py"


class Worker:
    """One host process and the pipes that hold it."""

    def __init__(self, address: str, *arguments: str) -> None:
        ready, ready_there = os.pipe()
        lifetime_there, self.lifetime = os.pipe()
        self.address = address
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "meshgate_worker", "--address", address, "--name", "workers-0"),
                *("--ready-fd", str(ready_there), "--lifetime-fd", str(lifetime_there), *arguments),
            ],
            pass_fds=(ready_there, lifetime_there),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.close(ready_there)
        os.close(lifetime_there)
        with os.fdopen(ready) as said:
            line = said.readline()
        self.ready: dict[str, Any] | None = json.loads(line) if line else None

    def let_go(self) -> None:
        if self.lifetime >= 0:
            os.close(self.lifetime)
            self.lifetime = -1

    def ended(self) -> tuple[int, str]:
        """The exit code and the last line of the output."""
        output, _ = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, output.decode().strip().rpartition("\n")[2]

    def close(self) -> None:
        self.let_go()
        self.process.wait(DEADLINE)
        assert self.process.stdout is not None
        self.process.stdout.close()


class Client:
    """A root client; ``pids`` are the processes that it spawned on the hosts."""

    def __init__(self, *addresses: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CLIENT), *addresses], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pids: list[int] = self.answer()

    def do(self, command: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(("[", '"')):
                return json.loads(line)
        raise AssertionError("the client ended")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
