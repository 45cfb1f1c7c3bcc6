"""A job without processes: the client, the proxies and the wire are real, the hosts are names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from meshgate.errors import JobNotRunning, JobUnsupported
from meshgate.jobs.saved import DEFAULT_JOB_PATH
from meshgate.jobs.state import JobState, attach_meshes
from meshgate.jobs.trait import JobTrait
from meshgate.proxies.client import Client
from meshgate.session.dialing import UrlDialer
from meshgate.testing.fake_cluster import FakeGateway

if TYPE_CHECKING:
    from meshgate.code_sync.push import SyncReport
    from meshgate.proxies import ProcMeshProxy
    from meshgate.transfer.download import Pulled


class FakeJob(JobTrait):
    """Runs actors in threads of this process: ``FakeJob({"workers": 2})``, for tests of drivers.

    It starts within milliseconds and needs neither Monarch nor other processes. Proxies, arguments, results,
    exceptions and channels go through the real client over a real websocket. What it does not do raises an error that
    says so: code sync, image steps, ``pull``, passing meshes to actors, and returning meshes from endpoints. What
    actors print is not captured.
    """

    def __init__(self, meshes: Mapping[str, int]) -> None:
        super().__init__()
        self._meshes = dict(meshes)
        self._gateway: FakeGateway | None = None

    @property
    def gateway(self) -> FakeGateway:
        """The running gateway. Raises ``JobNotRunning`` before ``apply()`` or ``state()``."""
        if self._gateway is None:
            raise JobNotRunning(f"{self!r} is not running: call apply() or state() first")
        return self._gateway

    def state(self, cached_path: str | None = DEFAULT_JOB_PATH, *, wait: bool | float = False) -> JobState:
        """The host meshes; applies the job if it is not running. ``cached_path`` is ignored."""
        return super().state(None, wait=wait)

    def can_run(self, spec: JobTrait) -> bool:
        """False: a fake job is never found in a file."""
        return False

    def cut(self) -> None:
        """Resets the connection between client and gateway; the client redials and the session continues."""
        self.gateway.cut()

    def kill_rank(self, procs: ProcMeshProxy, rank: int, reason: str = "the process was killed") -> None:
        """Makes one process of ``procs`` die: its calls fail with ``SupervisionError`` and a fault is reported."""
        self.gateway.kill_rank(procs._object, procs._ndslice.get(rank), reason)

    def sync(self, *, watch: bool = False, sync_dirs: Sequence[str] | None = None, quiet: bool = False) -> SyncReport:
        """Raises ``JobUnsupported``: actors run from the modules of this process."""
        self._unsupported("sync")

    def pull(
        self,
        remote: str,
        local: str | os.PathLike[str],
        ranks: Sequence[int] | int | None = None,
        mesh: str | None = None,
    ) -> Pulled:
        """Raises ``JobUnsupported``: the hosts have no files."""
        self._unsupported("pull")

    def __repr__(self) -> str:
        return f"FakeJob({self._meshes})"

    def _unsupported(self, method: str) -> NoReturn:
        raise JobUnsupported(f"FakeJob.{method}() is not supported: test it with ProcessJob")

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            self._unsupported("apply(client_script=...)")
        self._gateway = FakeGateway(self._meshes).__enter__()

    def _state(self) -> JobState:
        gateway = self.gateway
        if self._client is None or self._client.closed:
            self._client = Client.connect(UrlDialer(gateway.url, gateway.token))
        self._attached = attach_meshes(self._client, self._meshes, self._attached)
        return self._attached

    def _is_running(self) -> bool:
        return self._gateway is not None

    def _kill(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._gateway is not None:
            self._gateway.__exit__()
            self._gateway = None

    def _spec(self) -> dict[str, Any]:
        self._unsupported("dump")
