"""A driver that uses Monarch directly, with Monarch's ``ProcessJob``."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.driver import Driver
from benchmarks.peer import leave, serve
from benchmarks.processes import usage_of


class Direct(Driver):
    def open(self) -> dict[str, Any]:
        import monarch.actor
        from monarch.job import ProcessJob

        monarch.actor.unhandled_fault_hook = lambda failure: None
        self._job = ProcessJob({"workers": 2})
        self.hosts = self._job.state(cached_path=None).workers
        self.open_meshes()
        return {}

    def memory(self) -> dict[str, int]:
        """The resident bytes of this process, which corresponds to meshgate's engine."""
        own = usage_of(os.getpid())
        assert own is not None
        return {"engine": own.rss}

    def close(self) -> None:
        self._job.kill()


if __name__ == "__main__":
    serve(Direct())
    leave()
