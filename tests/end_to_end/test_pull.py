"""Pulls from real hosts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from meshgate import ProcessJob, PullFailed
from meshgate.errors import JobNotRunning

pytestmark = pytest.mark.any_release

DATA = os.urandom(5_000_000)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoint"
    (directory / "step" / "empty").mkdir(parents=True)
    (directory / "step" / "weights").write_bytes(DATA)
    (directory / "run.sh").write_text("#!/bin/sh\n")
    (directory / "run.sh").chmod(0o755)
    (directory / "latest").symlink_to("step")
    return directory


@pytest.mark.usefixtures("hosts")
def test_a_directory_is_pulled_from_one_rank(job: ProcessJob, checkpoint: Path, tmp_path: Path) -> None:
    local = tmp_path / "here"
    pulled = job.pull(str(checkpoint), local, ranks=1)
    assert (pulled.files, pulled.left_out) == (2, ())
    assert (local / "step" / "weights").read_bytes() == DATA
    assert (local / "step" / "empty").is_dir()
    assert os.access(local / "run.sh", os.X_OK)
    assert os.readlink(local / "latest") == "step"
    assert (local / "run.sh").stat().st_mtime_ns == (checkpoint / "run.sh").stat().st_mtime_ns
    assert job.pull(str(checkpoint), local, ranks=1).travelled == 0


@pytest.mark.usefixtures("hosts")
def test_every_rank_has_its_own_directory(job: ProcessJob, checkpoint: Path, tmp_path: Path) -> None:
    job.pull(str(checkpoint / "run.sh"), tmp_path / "all")
    assert sorted(str(path.relative_to(tmp_path / "all")) for path in (tmp_path / "all").rglob("*.sh")) == [
        "rank-0/run.sh",
        "rank-1/run.sh",
    ]


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize(("local", "path"), [("new", "new"), ("made/", "made/run.sh"), (".", "run.sh")])
def test_a_file_becomes_the_local_path_or_goes_into_it(
    job: ProcessJob, checkpoint: Path, tmp_path: Path, local: str, path: str
) -> None:
    job.pull(str(checkpoint / "run.sh"), f"{tmp_path}/{local}", ranks=[0])
    assert (tmp_path / path).read_text() == "#!/bin/sh\n"


@pytest.mark.usefixtures("hosts")
def test_a_missing_path_is_reported_with_its_host(job: ProcessJob, tmp_path: Path) -> None:
    with pytest.raises(PullFailed, match=rf"{tmp_path}/absent does not exist on workers-1") as caught:
        job.pull(f"{tmp_path}/absent", tmp_path / "x", ranks=1)
    assert caught.value.host == "workers-1"


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 2}, "ranks 0 to 1"),
        ({"ranks": []}, "ranks"),
        ({"ranks": "0"}, "ranks='0'"),
        ({"mesh": "others"}, "workers"),
    ],
)
def test_unknown_ranks_and_meshes_are_rejected(
    job: ProcessJob, tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        job.pull("/etc/hosts", tmp_path, **arguments)


def test_a_job_that_is_not_running_cannot_be_pulled_from(tmp_path: Path) -> None:
    with pytest.raises(JobNotRunning):
        ProcessJob({"workers": 1}).pull("/x", tmp_path)


@pytest.mark.usefixtures("hosts")
def test_one_line_summarizes_the_pull(
    job: ProcessJob, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.pull(str(checkpoint), tmp_path / "here", ranks=0)
    assert f"pulled {checkpoint}: 2 files, 5.0 MB, 5.0 MB transferred, in" in capsys.readouterr().err
