"""One worker host as a process, and a real Monarch root client as another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DEADLINE = 60.0
IDENTITY = "5b1c3f60-7a52-4c1e-9d38-2f6f0e7b9a41"
CLIENT = Path(__file__).parent / "root_client.py"


class Worker:
    """A host process and its pipes."""

    def __init__(self, address: str, *arguments: str, program: Sequence[str] = ("-m", "meshgate_worker")) -> None:
        ready, ready_write = os.pipe()
        lifetime_read, self.lifetime = os.pipe()
        self.address = address
        self.process = subprocess.Popen(
            [
                *(sys.executable, *program, "--address", address, "--name", "workers-0"),
                *("--identity", IDENTITY),
                *("--ready-fd", str(ready_write), "--lifetime-fd", str(lifetime_read), *arguments),
            ],
            pass_fds=(ready_write, lifetime_read),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.close(ready_write)
        os.close(lifetime_read)
        with os.fdopen(ready) as reader:
            line = reader.readline()
        self.ready: dict[str, Any] | None = json.loads(line) if line else None

    def release(self) -> None:
        if self.lifetime >= 0:
            os.close(self.lifetime)
            self.lifetime = -1

    def wait(self) -> tuple[int, str]:
        """The exit code and the last line of the output."""
        output, _ = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, output.decode().strip().rpartition("\n")[2]

    def close(self) -> None:
        self.release()
        self.process.wait(DEADLINE)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


class Client:
    """A root client; ``pids``: the processes that it spawned on the hosts."""

    def __init__(self, *addresses: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CLIENT), IDENTITY, *addresses],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pids: list[int] = self.answer()

    def run(self, command: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(("[", '"')):
                return json.loads(line)
        raise AssertionError("the client exited")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
