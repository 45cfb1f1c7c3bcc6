"""The step runner, used here without a host: completed steps, their record and their effects."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from meshgate import Image
from meshgate.images.on_host import TAIL_LINES, StepFailed, StepRunner, execute
from meshgate.images.plan import PlannedStep, plan
from meshgate_processes.marks import find_processes
from tests.small_disk import fill, small_disk

SHELL = ["/bin/sh", "-c"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHGATE_HOST_NAME", "workers-0")
    monkeypatch.setenv("MESHGATE_IMAGE_DIRECTORY", str(tmp_path / "files"))
    return tmp_path / "home"


def completed(home: Path, image: Image) -> Any:
    return StepRunner.completed_steps._method(StepRunner(str(home)), [step.digest for step in plan(image.live_steps)])


def run(home: Path, image: Image, index: int) -> Any:
    runner = StepRunner(str(home))
    return StepRunner.run_step._method(runner, index, [step.payload for step in plan(image.live_steps)])


def run_all(home: Path, image: Image) -> None:
    for index in range(len(image.live_steps)):
        assert run(home, image, index) == {"code": 0, "output": ""}


def log(tmp_path: Path, *letters: str) -> Image:
    """An image whose steps each append a letter to a file."""
    image = Image()
    for letter in letters:
        image = image.run_bash(f"echo {letter} >> '{tmp_path}/log'")
    return image


def logged(tmp_path: Path) -> list[str]:
    return (tmp_path / "log").read_text().split()


def test_a_completed_step_is_not_run_again(home: Path, tmp_path: Path) -> None:
    image = log(tmp_path, "a", "b")
    assert completed(home, image) == ("workers-0", 0, "")
    run_all(home, image)
    run_all(home, image)
    assert logged(tmp_path) == ["a", "b"]
    assert completed(home, image) == ("workers-0", 2, "")


def test_a_changed_step_and_all_later_ones_run_again(home: Path, tmp_path: Path) -> None:
    run_all(home, log(tmp_path, "a", "b", "c"))
    changed = log(tmp_path, "a", "B", "c")
    assert completed(home, changed) == ("workers-0", 1, "")
    run_all(home, changed)
    assert logged(tmp_path) == ["a", "b", "c", "B", "c"]


def test_a_shorter_image_forgets_the_later_steps(home: Path, tmp_path: Path) -> None:
    run_all(home, Image().set_env_vars({"A": "1"}).set_env_vars({"B": "2"}))
    shorter = Image().set_env_vars({"A": "1"})
    assert completed(home, shorter) == ("workers-0", 1, "")
    assert json.loads((home / "environment.json").read_text())["variables"] == {"A": "1"}


def test_a_failed_step_is_not_completed(home: Path, tmp_path: Path) -> None:
    image = log(tmp_path, "a").run_bash("echo reason; exit 7")
    assert run(home, image, 0)["code"] == 0
    assert run(home, image, 1) == {"code": 7, "output": "reason"}
    assert completed(home, image) == ("workers-0", 1, "")


def test_a_failed_step_forgets_the_completed_steps_that_it_replaces(home: Path, tmp_path: Path) -> None:
    image = log(tmp_path, "a", "b")
    run_all(home, image)
    assert run(home, log(tmp_path, "a").run_bash("exit 7"), 1)["code"] == 7
    assert completed(home, image) == ("workers-0", 1, "")


def test_a_step_whose_predecessor_is_missing_does_not_run(home: Path, tmp_path: Path) -> None:
    result = run(home, log(tmp_path, "a", "b"), 1)
    assert result["code"] is None
    assert "another session ran different steps" in result["output"]
    assert not (tmp_path / "log").exists()


def test_a_step_sees_the_variables_of_earlier_steps(home: Path, tmp_path: Path) -> None:
    run_all(home, Image().set_env_vars({"A": "$HOME x"}).run_bash(f'echo "$A" > "{tmp_path}/log"'))
    assert (tmp_path / "log").read_text() == "$HOME x\n"


def test_files_that_may_hold_secrets_are_for_their_owner_only(home: Path) -> None:
    run_all(home, Image().set_env_vars({"PASSWORD": "secret"}))
    modes = {name: stat.S_IMODE((home / name).stat().st_mode) for name in ("environment.json", "image")}
    assert modes == {"environment.json": 0o600, "image": 0o700}


def test_a_copy_extracts_what_was_received(home: Path, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("content")
    image = Image().copy(tmp_path / "data", "sub/")
    (step,) = plan(image.live_steps)
    assert completed(home, image) == ("workers-0", 0, "")
    runner = StepRunner(str(home))
    assert receive(runner, step, tmp_path) == ""
    assert StepRunner.run_step._method(runner, 0, [step.payload])["code"] == 0
    assert (tmp_path / "files/sub/data").read_text() == "content"
    assert list((home / "image/incoming").iterdir()) == []


def receive(runner: StepRunner, step: PlannedStep, tmp_path: Path) -> str:
    assert step.content is not None
    with (tmp_path / "tar").open("w+b") as file:
        step.content.write_tar(file)
        file.seek(0)
        return str(StepRunner.receive_content._method(runner, step.digest, 0, file.read()))


ANOTHER_DISK = "or set MESHGATE_HOME to a directory on another disk"


def test_the_error_of_a_full_disk_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHGATE_HOST_NAME", "workers-0")
    (tmp_path / "data").write_bytes(bytes(2**20))
    image = Image().copy(tmp_path / "data", str(tmp_path / "there/data")).run_bash("true")
    steps = plan(image.live_steps)
    with small_disk(tmp_path / "small") as disk:
        home = disk / "home"
        runner = StepRunner(str(home))
        assert completed(home, image) == ("workers-0", 0, "")
        path = f"{home}/image/incoming/{steps[0].digest}.{os.getpid()}"
        problem = receive(runner, steps[0], tmp_path)
        assert problem.startswith(f"no space left on the disk that holds {path}: 0.0 MB are free. Free some there, ")
        assert problem.endswith(ANOTHER_DISK)
        os.unlink(path)
        fill(disk)
        result = StepRunner.run_step._method(runner, 0, [step.payload for step in steps])
        assert result["code"] is None
        assert result["output"].startswith(f"no inodes left on the disk that holds {home}/")
        _, _, problem = completed(disk / "other", image)
        assert problem.startswith(f"no inodes left on the disk that holds {disk}/other")
        assert problem.endswith(ANOTHER_DISK)


def test_the_error_of_a_full_disk_names_what_is_copied_to(home: Path, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(2**20))
    with small_disk(tmp_path / "small") as disk:
        image = Image().copy(tmp_path / "data", f"{disk}/data/")
        (step,) = plan(image.live_steps)
        completed(home, image)
        runner = StepRunner(str(home))
        assert receive(runner, step, tmp_path) == ""
        result = StepRunner.run_step._method(runner, 0, [step.payload])
    assert result["code"] is None
    assert re.fullmatch(
        f"no space left on the disk that holds {disk}/data/?: 0.0 MB are free. Free some there", result["output"]
    )


def test_the_error_of_a_read_only_file_system_says_where_a_pod_can_be_written_to(home: Path) -> None:
    error = OSError(errno.EROFS, os.strerror(errno.EROFS), "/etc/trainer")
    problem = "/etc/trainer is read-only: in a pod, write to /tmp, the home directory or a volume"
    assert StepRunner(str(home))._problem(error) == problem


def test_output_is_forwarded(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    execute([*SHELL, "echo $A in $(pwd); echo error >&2"], {"A": "value", "PATH": os.defpath}, str(tmp_path))
    assert capfd.readouterr().out == f"value in {tmp_path}\nerror\n"


@pytest.mark.parametrize(("command", "code"), [("exit 7", 7), ("kill -9 $$", 137)])
def test_a_failure_carries_exit_code_and_last_lines(command: str, code: int, tmp_path: Path) -> None:
    with pytest.raises(StepFailed) as raised:
        execute([*SHELL, f"seq 1 100; {command}"], dict(os.environ), str(tmp_path))
    assert raised.value.code == code
    assert raised.value.output.split() == [str(number) for number in range(101 - TAIL_LINES, 101)]


def test_background_processes_end_with_the_command(tmp_path: Path) -> None:
    execute([*SHELL, "LEFT_BEHIND=3 sleep 1000 & exit 0"], dict(os.environ), str(tmp_path))
    assert find_processes("LEFT_BEHIND=3") == []
