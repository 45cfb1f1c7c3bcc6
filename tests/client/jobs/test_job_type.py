"""A job type made by the recipe of CONTRIBUTING.md offers all that jobs offer."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import Self

from meshgate.jobs.local_gateway import GatewayRecord, LaunchOptions, LocalGateway
from meshgate.jobs.state import JobState
from meshgate.jobs.trait import JobTrait, job_load
from meshgate.session.dialing import Dialer, UrlDialer

CONTRIBUTING = Path(__file__).parents[3] / "CONTRIBUTING.md"


class OneGatewayJob(JobTrait):
    """A gateway on this machine. ``directory`` is for its log."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self._directory = directory
        self._gateway: LocalGateway | None = None

    def _create(self, client_script: str | None) -> None:
        self._gateway = LocalGateway.start(
            LaunchOptions(
                apply_id=str(self._apply_id),
                meshes=self._mesh_sizes(),
                environment={},
                log=Path(self._directory, "log"),
                lease=600,
                idle_timeout=600,
            )
        )

    def _dialer(self) -> Dialer:
        assert self._gateway is not None
        return UrlDialer(self._gateway.record.url, self._gateway.record.token)

    def _mesh_sizes(self) -> Mapping[str, int]:
        return {"workers": 1}

    def _state(self) -> JobState:
        return self._attach_meshes(self._mesh_sizes())

    def _kill(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._gateway is not None:
            self._gateway.stop()

    def _is_running(self) -> bool:
        return self._gateway is not None and self._gateway.healthy()

    def can_run(self, spec: JobTrait) -> bool:
        return isinstance(spec, OneGatewayJob) and self._is_running()

    def _outlive_driver(self) -> None:
        assert self._gateway is not None
        self._gateway.outlive_driver()

    def _spec(self) -> dict[str, Any]:
        return {"directory": self._directory}

    def _allocation(self) -> dict[str, Any]:
        assert self._gateway is not None
        return asdict(self._gateway.record)

    @classmethod
    def _restore(cls, spec: dict[str, Any], allocation: dict[str, Any] | None) -> Self:
        job = cls(**spec)
        job._gateway = LocalGateway(GatewayRecord(**allocation)) if allocation else None
        return job


def test_the_recipe_names_what_this_type_implements() -> None:
    recipe = re.search(r"\*\*Add a job type\.\*\*.*?\n\n", CONTRIBUTING.read_text(), re.DOTALL)
    assert recipe is not None
    methods = {name for name, value in vars(OneGatewayJob).items() if inspect.isroutine(value)}
    implemented = methods & set(dir(JobTrait)) - set(dir(object))
    assert set(re.findall(r"`(_?[a-z_]+)`", recipe[0])) == implemented


def test_a_type_that_follows_the_recipe_offers_what_jobs_offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project := tmp_path / "project").mkdir()
    (project / "hello.py").write_text("print('hello')\n")
    monkeypatch.chdir(project)
    job, file = OneGatewayJob(str(tmp_path)), str(tmp_path / "job")
    try:
        assert dict(job.state(cached_path=file).workers.sizes) == {"hosts": 1}
        assert [host.mesh for host in job.status().hosts] == ["workers"]
        job._output({})  # of `meshgate logs`
        run = job.submit(["python", "hello.py"], sync_dirs=[str(project)])
        assert (run.wait(), list(run.logs())) == (0, ["hello\n"])
        assert job.detach("night") == "night"
        other = job_load(file)
        assert other.attach("night").name == "night"
        assert [session.name for session in other.sessions()] == ["night"]
        other.kill()
    finally:
        job.kill()
