from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from meshgate.errors import JobFileError
from meshgate.jobs.saved import SavedJob, locked, read_job_file, write_job_file

SAVED = SavedJob(kind="meshgate.jobs.process:ProcessJob", apply_id="1", spec={"meshes": {"a": 1}}, allocation={})


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("unpickled",)


def test_bytes_round_trip() -> None:
    assert SavedJob.from_bytes(SAVED.to_bytes()) == SAVED


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a saved meshgate job"),
        (b"{}", "not a saved meshgate job"),
        (b"meshgate job\n", "damaged"),
        (b"meshgate job\n{}", "kind"),
        (SAVED.to_bytes()[:-20], "damaged"),
        (SAVED.to_bytes().replace(b'"format":1', b'"format":2'), "format"),
        (SAVED.to_bytes().replace(b'"kind"', b'"gadget":1,"kind"'), "gadget"),
    ],
)
def test_other_bytes_are_rejected_with_the_reason(data: bytes, message: str) -> None:
    with pytest.raises(JobFileError, match=message):
        SavedJob.from_bytes(data)


def test_a_pickle_is_recognized_and_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JobFileError, match="a pickle"):
        SavedJob.from_bytes(pickle.dumps(Bomb()))
    assert not Path("unpickled").exists()


def test_a_file_is_written_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "job.pkl"
    write_job_file(str(path), b"x")
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_job_file(str(path)) == b"x"
    assert os.listdir(path.parent) == ["job.pkl"]


def test_a_file_that_other_users_may_read_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "job.pkl"
    write_job_file(str(path), SAVED.to_bytes())
    path.chmod(0o640)
    with pytest.raises(JobFileError, match="chmod 600"):
        read_job_file(str(path))


def test_no_advice_is_given_on_a_file_that_is_not_a_job(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("of the user")
    path.chmod(0o644)
    with pytest.raises(JobFileError, match=r"notes is not a saved meshgate job$"):
        SavedJob.from_bytes(read_job_file(str(path)), str(path))


def test_a_file_of_another_user_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "job.pkl"
    write_job_file(str(path), b"x")
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(JobFileError, match=f"belongs to user {own}"):
        read_job_file(str(path))


def test_a_pipe_is_rejected_without_blocking(tmp_path: Path) -> None:
    path = tmp_path / "job.pkl"
    os.mkfifo(path, 0o600)
    with pytest.raises(JobFileError, match="not a regular file"):
        read_job_file(str(path))


def test_an_oversized_file_is_rejected_unread(tmp_path: Path) -> None:
    path = tmp_path / "job.pkl"
    write_job_file(str(path), b"")
    os.truncate(path, 1 << 40)
    with pytest.raises(JobFileError, match="1099511627776 bytes"):
        read_job_file(str(path))


def test_a_symlink_is_followed_and_kept(tmp_path: Path) -> None:
    link, target = tmp_path / "link.pkl", tmp_path / "there" / "job.pkl"
    link.symlink_to(target)
    write_job_file(str(link), b"x")
    assert link.is_symlink()
    assert target.read_bytes() == b"x"


def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "job.pkl"
    write_job_file(str(path), b"old")
    with pytest.raises(TypeError):
        write_job_file(str(path), "not bytes")  # type: ignore[arg-type]
    assert read_job_file(str(path)) == b"old"
    assert os.listdir(tmp_path) == ["job.pkl"]


def test_the_second_process_waits_for_the_lock(tmp_path: Path) -> None:
    path = str(tmp_path / "job.pkl")
    program = "import sys; from meshgate.jobs.saved import locked\nwith locked(sys.argv[1]): print('entered')"
    with locked(path):
        second = subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE)
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(timeout=1)
    assert second.communicate(timeout=60) == (b"entered\n", None)
