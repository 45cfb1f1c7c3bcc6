"""A supervisor within the test's own process, for tests of one part of the server."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshgate_gateway.child_process import Process, start_process
from meshgate_gateway.supervisor.supervisor import KeptDescriptors, Note, command_with_descriptors


class UnsupervisedProcess:
    """A child of the test, as a ``SupervisedProcess``."""

    def __init__(self, supervisor: Unsupervised, key: str, note: Note, process: Process) -> None:
        self.key, self.note, self.pid, self.output = key, note, process.pid, process.output
        self.kept: list[int] = []
        self._supervisor, self._process = supervisor, process

    def on_exit(self, callback: Callable[[int], None]) -> None:
        self._process.on_exit(callback)

    def send_signal(self, signum: signal.Signals) -> None:
        self._process.send_signal(signum)

    def annotate(self, note: Note) -> None:
        self.note = note

    def release(self) -> None:
        pass

    def forget(self) -> None:
        self._supervisor.children.pop(self.key, None)


class Unsupervised:
    """Has the methods of a ``SupervisorLink``. What it keeps is dropped by ``close``."""

    predecessor: str | None = None

    def __init__(self) -> None:
        self.supervisor_pid = os.getpid()
        self.kept: dict[str, KeptDescriptors] = {}
        self.children: dict[str, Any] = {}

    def start(
        self,
        key: str,
        note: Note,
        command: Sequence[str],
        environment: Mapping[str, str],
        descriptors: Sequence[int] = (),
        kept: Sequence[int] = (),
    ) -> Any:
        process = start_process(command_with_descriptors(command, descriptors), environment, descriptors)
        self.children[key] = UnsupervisedProcess(self, key, note, process)
        return self.children[key]

    def keep(self, key: str, note: Note, descriptors: Sequence[int] = ()) -> None:
        self.drop(key)
        self.kept[key] = KeptDescriptors(note, [os.dup(descriptor) for descriptor in descriptors])

    def drop(self, key: str) -> None:
        if kept := self.kept.pop(key, None):
            for descriptor in kept.descriptors:
                os.close(descriptor)

    def close(self) -> None:
        for key in list(self.kept):
            self.drop(key)
