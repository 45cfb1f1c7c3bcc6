"""A driver whose code is watched: saves a file, and calls until the new line has run. Real hosts, real Monarch."""

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

_PATIENCE = 30.0
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
    """Two hosts with a process each."""

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
        self._actors.line.call().get(timeout=_PATIENCE)
        return {}

    def saves(self, how: str, times: int) -> list[float]:
        """Seconds from each save to the result of the first call of both hosts that ran the new line."""
        return [self._save(getattr(self, f"_{how}")) for _ in range(times)]

    def _save(self, call: Any) -> float:
        client = self._job._client
        before = client.code_version
        self._line += 1
        begin = time.perf_counter()
        self._settings.write_text(_SETTINGS.format(line=self._line))
        while client.code_version == before:  # until the watcher has offered it: what a spawn names from then on
            if time.perf_counter() - begin > _PATIENCE:
                raise TimeoutError(f"a save was not pushed within {_PATIENCE:.0f} s")
            time.sleep(0.0005)
        found = set(call().values())
        took = time.perf_counter() - begin
        if found != {self._line}:
            raise AssertionError(f"{found} ran where line {self._line} was saved")
        return took

    def _reload(self) -> Any:
        """Running processes and actors: the module is reloaded beneath them."""
        self._procs.reload().get(timeout=_PATIENCE)
        return self._actors.line.call().get(timeout=_PATIENCE)

    def _spawn(self) -> Any:
        """New actors in running processes."""
        return self._procs.spawn(f"watched{self._line}", self._model).line.call().get(timeout=_PATIENCE)

    def _fresh(self) -> Any:
        """New processes."""
        procs = self._hosts.spawn_procs(name=f"fresh{self._line}")
        found = procs.spawn("fresh", self._model).line.call().get(timeout=_PATIENCE)
        procs.stop()
        return found

    def close(self) -> None:
        self._stack.close()


if __name__ == "__main__":
    serve(Saving())
    leave()
