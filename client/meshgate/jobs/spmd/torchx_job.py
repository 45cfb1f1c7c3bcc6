"""A job whose hosts torchx starts on this machine, as processes or containers, and whose gateway runs here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshgate.jobs.process import LocalGatewayJob, LocalRequest
from meshgate.jobs.spmd.torchx_app import TorchXApp, require_torchx
from meshgate.jobs.this_machine.local_gateway import JOB_VARIABLE
from meshgate.jobs.trait import JobTrait


class TorchXJob(LocalGatewayJob):
    """One host for each replica of an AppDef's role. It ends with this process, and no other process finds it."""

    def __init__(self, appdef: Any, scheduler: str, config: Mapping[str, Any]) -> None:
        require_torchx()
        super().__init__(LocalRequest(meshes={"workers": appdef.roles[0].num_replicas}))
        self._appdef, self._scheduler, self._config = appdef, scheduler, dict(config)
        self._app: TorchXApp | None = None

    def can_run(self, spec: JobTrait) -> bool:
        """Always False: a TorchXJob is never reused."""
        return False

    @property
    def shares_files(self) -> bool:
        """Whether the hosts see this machine's files."""
        return self._scheduler == "local_cwd"

    def _start_hosts(self, apply_id: str) -> tuple[Mapping[str, Sequence[str]], Mapping[str, str]]:
        self._app = TorchXApp(self._appdef, self._scheduler, self._config, {JOB_VARIABLE: apply_id})
        try:
            addresses = self._app.wait_addresses()
            host = self._app.engine_host()
        except BaseException:
            self._app.end()
            self._app = None
            raise
        return {"workers": addresses}, {"MESHGATE_ENGINE_HOST": host} if host is not None else {}

    def _is_running(self) -> bool:
        return super()._is_running() and self._app is not None and self._app.running()

    def _kill(self) -> None:
        try:
            super()._kill()
        finally:
            if self._app is not None:
                self._app.end()
                self._app = None

    @property
    def _ends_with_driver(self) -> bool:
        return True

    def _outlive_driver(self) -> None:
        """Does nothing: the replicas end with this process."""
