"""When a KubernetesJob pushes the driver's code."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshgate import Compute, KubernetesJob
from meshgate.code_sync.session_sync import sync_for
from meshgate.jobs.trait import CachedRunning
from meshgate.session.dialing import UrlDialer
from meshgate_sync.upload.protocol import SyncOffer
from meshgate_wire.messages import Sync
from tests.client.scripted_gateway import TOKEN, ScriptedGateway


class FakeProvider:
    """Every job runs behind one gateway."""

    name_is_optional = True

    def __init__(self, url: str) -> None:
        self._url = url

    def start(self, request: Any, created: Any) -> Any:
        return SimpleNamespace(name="here", uid="", meshes={"workers": 2})

    def runs(self, job: Any) -> bool:
        return True

    def end(self, job: Any) -> None:
        pass

    def dialer(self, job: Any) -> UrlDialer:
        return UrlDialer(self._url, TOKEN)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    repository = tmp_path / "repository"
    (repository / ".git").mkdir(parents=True)
    (repository / "model.py").write_text("STEP = 1\n")
    monkeypatch.chdir(repository)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return repository


@pytest.fixture
def job(gateway: ScriptedGateway, repository: Path) -> Iterator[Any]:
    with KubernetesJob(compute=Compute(replicas=2)) as job:
        job._cached_provider = FakeProvider(gateway.url)  # type: ignore[assignment]
        yield job


def versions(gateway: ScriptedGateway, job: KubernetesJob) -> list[str]:
    """The versions offered so far, once the gateway has received everything."""
    assert job._client is not None
    job._client.attach_hosts("workers", 2).initialized.get(timeout=30)
    return [SyncOffer.model_validate_json(header.body).root for header in gateway.got(Sync)]


def test_every_state_pushes_what_was_saved_since(gateway: ScriptedGateway, job: Any, repository: Path) -> None:
    job.state()
    job.state()
    first = job._client.code_version
    (repository / "model.py").write_text("STEP = 22\n")
    job.state()
    assert job._client.code_version != first
    assert versions(gateway, job) == [first, job._client.code_version]


def test_a_running_job_gets_the_directories_of_the_driver_that_finds_it(
    gateway: ScriptedGateway, job: Any, repository: Path
) -> None:
    job.apply()
    for name in ("mine", "other"):
        (repository / name).mkdir()
        (repository / name / "code.py").write_text(f"NAME = {name!r}\n")
    finder = KubernetesJob(compute=Compute(replicas=2), sync_dirs=["mine"])
    finder._status = CachedRunning(job)
    finder.state()
    assert sync_for(job._client, None).tree.top == Path(os.path.realpath("mine"))
