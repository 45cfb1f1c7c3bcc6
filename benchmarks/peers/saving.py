"""A driver with ``job.sync(watch=True)`` that saves a file and measures when the new line has run."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.peer import leave, serve

_TIMEOUT = 30.0
_SETTINGS = "LINE = {line}\n"
_MODEL = """
from meshgate import Actor, endpoint
import saved_settings

class Model(Actor):
    @endpoint
    def line(self) -> int:
        return saved_settings.LINE
"""


class Saving:
    """Saves on two hosts with one process each."""

    def open(self) -> dict[str, Any]:
        from meshgate import ProcessJob

        self._stack = ExitStack()
        self._top = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="meshgate-bench-")))
        self._settings = self._top / "saved_settings.py"
        self._line = 0
        self._settings.write_text(_SETTINGS.format(line=0))
        (self._top / "saved_model.py").write_text(_MODEL)
        os.chdir(self._top)
        sys.path.insert(0, str(self._top))
        self._job = self._stack.enter_context(ProcessJob({"workers": 2}))
        self._hosts = self._job.state(cached_path=None).workers
        self._job.sync(watch=True, quiet=True)
        self._model = importlib.import_module("saved_model").Model
        self._procs = self._hosts.spawn_procs(name="watched")
        self._actors = self._procs.spawn("watched", self._model)
        self._actors.line.call().get(timeout=_TIMEOUT)
        return {}

    def saves(self, how: str, times: int) -> list[float]:
        """Seconds from each save until a call to both hosts has run the new line."""
        return [self._save(getattr(self, f"_{how}")) for _ in range(times)]

    def _save(self, call: Any) -> float:
        client = self._job._client
        before = client.code_version
        self._line += 1
        start = time.perf_counter()
        self._settings.write_text(_SETTINGS.format(line=self._line))
        while client.code_version == before:  # until the watcher has pushed it, so that a spawn uses it
            if time.perf_counter() - start > _TIMEOUT:
                raise TimeoutError(f"a save was not pushed within {_TIMEOUT:.0f} s")
            time.sleep(0.0005)
        found = set(call().values())
        duration = time.perf_counter() - start
        if found != {self._line}:
            raise AssertionError(f"line {found} ran, but line {self._line} was saved")
        return duration

    def _reload(self) -> Any:
        """With running processes and actors: reloads the module."""
        self._procs.reload().get(timeout=_TIMEOUT)
        return self._actors.line.call().get(timeout=_TIMEOUT)

    def _spawn(self) -> Any:
        """With new actors in running processes."""
        return self._procs.spawn(f"watched{self._line}", self._model).line.call().get(timeout=_TIMEOUT)

    def _fresh(self) -> Any:
        """With new processes."""
        procs = self._hosts.spawn_procs(name=f"fresh{self._line}")
        found = procs.spawn("fresh", self._model).line.call().get(timeout=_TIMEOUT)
        procs.stop()
        return found

    def close(self) -> None:
        self._stack.close()


if __name__ == "__main__":
    serve(Saving())
    leave()
