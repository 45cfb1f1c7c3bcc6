"""Files come back from real hosts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from meshgate import ProcessJob, PullFailed
from meshgate.errors import JobNotRunning

DATA = os.urandom(5_000_000)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    place = tmp_path / "checkpoint"
    (place / "step" / "empty").mkdir(parents=True)
    (place / "step" / "weights").write_bytes(DATA)
    (place / "run.sh").write_text("#!/bin/sh\n")
    (place / "run.sh").chmod(0o755)
    (place / "latest").symlink_to("step")
    return place


@pytest.mark.usefixtures("hosts")
def test_a_directory_comes_from_one_rank(job: ProcessJob, checkpoint: Path, tmp_path: Path) -> None:
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
def test_every_rank_has_a_directory_of_its_own(job: ProcessJob, checkpoint: Path, tmp_path: Path) -> None:
    job.pull(str(checkpoint / "run.sh"), tmp_path / "all")
    assert sorted(str(path.relative_to(tmp_path / "all")) for path in (tmp_path / "all").rglob("*.sh")) == [
        "rank-0/run.sh",
        "rank-1/run.sh",
    ]


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize(("local", "path"), [("new", "new"), ("made/", "made/run.sh"), (".", "run.sh")])
def test_a_file_becomes_the_place_or_goes_into_it(
    job: ProcessJob, checkpoint: Path, tmp_path: Path, local: str, path: str
) -> None:
    job.pull(str(checkpoint / "run.sh"), f"{tmp_path}/{local}", ranks=[0])
    assert (tmp_path / path).read_text() == "#!/bin/sh\n"


@pytest.mark.usefixtures("hosts")
def test_what_is_not_there_is_told_with_host_and_path(job: ProcessJob, tmp_path: Path) -> None:
    with pytest.raises(PullFailed, match=rf"there is no {tmp_path}/absent on workers-1") as caught:
        job.pull(f"{tmp_path}/absent", tmp_path / "x", ranks=1)
    assert caught.value.host == "workers-1"


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"ranks": 2}, "ranks 0 to 1"),
        ({"ranks": []}, "ranks"),
        ({"ranks": "0"}, "ranks='0'"),
        ({"mesh": "others"}, "workers"),
    ],
)
def test_ranks_and_meshes_that_are_not_there_are_refused(
    job: ProcessJob, tmp_path: Path, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        job.pull("/etc/hosts", tmp_path, **wrong)


def test_a_job_that_does_not_run_has_nothing_to_pull(tmp_path: Path) -> None:
    with pytest.raises(JobNotRunning):
        ProcessJob({"workers": 1}).pull("/x", tmp_path)


@pytest.mark.usefixtures("hosts")
def test_one_line_says_what_was_pulled(
    job: ProcessJob, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.pull(str(checkpoint), tmp_path / "here", ranks=0)
    assert f"pulled {checkpoint}: 2 files, 5.0 MB, of which 5.0 MB travelled, in" in capsys.readouterr().err
