"""A driver next to the hosts: Monarch alone, its own ``ProcessJob``."""

from __future__ import annotations

from typing import Any

from benchmarks.driver import Driver
from benchmarks.peer import leave, serve


class Direct(Driver):
    def open(self) -> dict[str, Any]:
        import monarch.actor
        from monarch.job import ProcessJob

        monarch.actor.unhandled_fault_hook = lambda failure: None
        self._job = ProcessJob({"workers": 2})
        self.hosts = self._job.state(cached_path=None).workers
        self.open_meshes()
        return {}

    def close(self) -> None:
        self._job.kill()


if __name__ == "__main__":
    serve(Direct())
    leave()
