from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshgate.jobs.this_machine import job_directory
from meshgate.jobs.this_machine.job_directory import create_job_directory, prune_job_directories, remove_job_directory
from meshgate_slurm.gateway_process import TEMPORARY_PREFIX


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A directory with a path that is short enough, in which even a young directory may be pruned."""
    monkeypatch.setattr(job_directory, "MIN_AGE", -1.0)
    path = tempfile.mkdtemp(prefix="m-", dir="/tmp")
    yield path
    shutil.rmtree(path)


def test_a_directory_is_private_and_removed_with_what_it_contains(parent: str) -> None:
    path, lock = create_job_directory(parent)
    os.close(lock)
    assert os.path.dirname(path) == parent
    assert os.stat(path).st_mode & 0o777 == 0o700
    (Path(path) / "inside").mkdir()
    remove_job_directory(path)
    remove_job_directory(path)
    assert os.listdir(parent) == []


def test_only_directories_whose_gateway_has_ended_are_pruned(parent: str) -> None:
    (running, lock), (_, its_lock) = (create_job_directory(parent) for _ in range(2))
    os.close(its_lock)
    (Path(parent) / "another").mkdir()
    prune_job_directories(parent)
    assert sorted(os.listdir(parent)) == sorted(["another", os.path.basename(running)])
    os.close(lock)
    prune_job_directories(parent)
    assert os.listdir(parent) == ["another"]


@pytest.mark.filterwarnings("error")
def test_a_directory_into_which_a_process_still_writes_is_left_to_the_next_job(
    parent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock = create_job_directory(parent)
    os.close(lock)

    def write_again(directory: str, **_: object) -> None:
        (Path(path) / "late").touch()
        os_rmdir(directory, **_)

    os_rmdir: Any = os.rmdir
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", write_again)
        prune_job_directories(parent)
    assert os.listdir(path) == ["late"]
    prune_job_directories(parent)
    assert os.listdir(parent) == []


def test_the_directories_of_slurm_gateways_are_not_pruned(parent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_directory, "MIN_AGE", -1)
    directory = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=parent))
    prune_job_directories(parent)
    assert directory.exists()


def test_a_directory_that_may_not_be_locked_yet_is_not_pruned(parent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_directory, "MIN_AGE", 60.0)
    path, lock = create_job_directory(parent)
    os.close(lock)
    prune_job_directories(parent)
    assert os.listdir(parent) == [os.path.basename(path)]


def test_sockets_fit_into_the_directory_even_if_the_usual_place_has_a_long_path(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    path, lock = create_job_directory(str(long))
    os.close(lock)
    os.rmdir(path)
    assert os.path.dirname(path) == "/tmp"


def test_a_directory_that_cannot_be_removed_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="cannot remove the temporary files of a job in .*file"):
        remove_job_directory(str(tmp_path / "file"))
