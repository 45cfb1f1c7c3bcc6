"""Actors of the Slurm tests. Its classes are pickled by value, because nodes do not have this module."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import threading

import cloudpickle

from meshgate import Actor, endpoint

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Trainer(Actor):
    @endpoint
    def node(self) -> str:
        return os.uname().nodename

    @endpoint
    def directories(self) -> tuple[str, str]:
        """The working directory, and that of temporary files."""
        return os.getcwd(), tempfile.gettempdir()

    @endpoint
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    @endpoint
    def imported(self, module: str, name: str) -> str:
        return str(getattr(importlib.import_module(module), name))

    @endpoint
    def wait(self) -> None:
        threading.Event().wait()

    @endpoint
    def fill_memory(self) -> None:
        kept = []
        while True:
            kept.append(os.urandom(1) * 10_000_000)
