"""The program of a command is found on this machine, in the synced project, or left to the workers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshgate.jobs.spmd.program import find_program, local_file, require_program
from meshgate.jobs.spmd.run import Program
from meshgate.jobs.spmd.torchrun import TorchrunCommand


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "project" / "jobs").mkdir(parents=True)
    (tmp_path / "project" / "jobs" / "train.py").touch()
    return tmp_path / "project"


def test_without_synced_code_the_script_is_named_by_its_absolute_path(project: Path) -> None:
    command = TorchrunCommand("script", "jobs/train.py", ("-x",))
    assert find_program(command, str(project), None) == Program("script", str(project / "jobs/train.py"), ("-x",))


def test_a_synced_script_is_named_by_its_place_in_the_project(project: Path) -> None:
    command = TorchrunCommand("script", "train.py")
    program = find_program(command, str(project / "jobs"), project)
    assert (program.synced, program.directory) == ("jobs/train.py", "jobs")


def test_a_script_outside_of_the_synced_project_is_refused(project: Path) -> None:
    (project.parent / "other.py").touch()
    with pytest.raises(ValueError, match=r"other.py is outside of the synced project"):
        find_program(TorchrunCommand("script", "../other.py"), str(project), project)


def test_a_directory_outside_of_the_project_is_replaced_by_its_top(project: Path) -> None:
    command = TorchrunCommand("script", str(project / "jobs/train.py"))
    assert find_program(command, str(project.parent), project).directory == ""


@pytest.mark.parametrize(
    "command",
    [
        TorchrunCommand("module", "pkg.train"),
        TorchrunCommand("executable", "nvidia-smi"),
        TorchrunCommand("script", "/opt/app/train.py"),
    ],
)
def test_what_only_workers_have_is_left_to_them(command: TorchrunCommand, project: Path) -> None:
    require_program(command, str(project))
    assert local_file(command, str(project)) is None
    assert find_program(command, str(project), project).synced is None


@pytest.mark.parametrize("command", [TorchrunCommand("script", "typo.py"), TorchrunCommand("executable", "./typo")])
def test_a_missing_file_is_an_error_that_names_the_directory(command: TorchrunCommand, project: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"{re.escape(command.program)} does not exist in {project}"):
        require_program(command, str(project))


def test_a_directory_is_not_a_script(project: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"the script \. is a directory in "):
        require_program(TorchrunCommand("script", "."), str(project))
