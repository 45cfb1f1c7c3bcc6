"""When a KubernetesJob pushes the driver's code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from meshgate import Compute, KubernetesJob
from meshgate.code_sync import session_sync
from meshgate.code_sync.session_sync import sync_for
from meshgate.jobs.trait import CachedRunning
from meshgate.session.dialing import UrlDialer
from meshgate_sync.errors import TreeError
from meshgate_sync.upload import SyncOffer
from meshgate_wire.messages import Sync
from tests.client.scripted_gateway import TOKEN, ScriptedGateway


class FakeProvider:
    """Every job runs behind one gateway."""

    name_is_optional = True

    def __init__(self, url: str) -> None:
        self._url = url

    def start(self, request: Any, created: Any) -> Any:
        return SimpleNamespace(name="here", uid="", meshes={"workers": 2})

    def refreshed(self, job: Any) -> Any:
        return job

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


@pytest.fixture
def program(gateway: ScriptedGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Any]]:
    """The directory of a program of two files without git, and its job."""
    directory = tmp_path / "home/program"
    directory.mkdir(parents=True)
    for name in ("train_of_two", "helper_of_two"):
        (directory / f"{name}.py").write_text("")
    main = ModuleType("__main__")
    main.__file__ = str(directory / "train_of_two.py")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(directory))
    with KubernetesJob(compute=Compute(replicas=2)) as job:
        job._cached_provider = FakeProvider(gateway.url)  # type: ignore[assignment]
        yield directory, job


def import_helper(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = ModuleType("helper_of_two")
    helper.__file__ = str(directory / "helper_of_two.py")
    monkeypatch.setitem(sys.modules, "helper_of_two", helper)


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


def test_a_program_without_git_pushes_its_directory(gateway: ScriptedGateway, program: tuple[Path, Any]) -> None:
    directory, job = program
    job.state()
    assert sync_for(job._client, None).tree.top == directory.resolve()
    assert versions(gateway, job) == [job._client.code_version]


@pytest.mark.parametrize("kind", ["home", "too large"])
def test_a_program_whose_directory_cannot_be_synced_is_refused_if_it_imports_from_there(
    program: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    directory, job = program
    if kind == "home":
        monkeypatch.setenv("HOME", str(directory))
        problem = "it is the home directory"
    else:
        with (directory / "data.bin").open("wb") as file:
            file.truncate(2_000_000_000)
        problem = "it has 2,000 MB, the limit is 1,000 MB"
    for _ in range(2):  # a program of one file runs all the same, and prints one line
        job.state()
    assert capsys.readouterr().err.count(problem) == 1
    assert job._client.code_version is None
    session_sync._without_code.clear()
    import_helper(directory, monkeypatch)
    with pytest.raises(TreeError, match=rf"(?s){problem}.*sync_dirs.*imports helper_of_two from {directory}"):
        job.state()


def test_a_prompt_without_git_pushes_its_directory_once_it_imports_from_there(
    program: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, job = program
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    monkeypatch.chdir(directory)
    job.state()
    assert job._client.code_version is None
    import_helper(directory, monkeypatch)
    job.state()
    assert job._client.code_version is not None
