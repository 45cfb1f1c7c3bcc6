from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path

import pytest

from meshgate.errors import ConnectionFailedError, JobCacheWarning, JobError, JobFileError
from meshgate.jobs.find import find_job
from meshgate.jobs.local_gateway import GatewayRecord
from meshgate.jobs.process import ProcessJob
from meshgate.jobs.saved import SavedJob, find_cached_job, locked, read_job_file, remove_job_file, write_job_file
from meshgate.jobs.trait import job_load
from tests.client.jobs.fake_job import RUNNING, FakeJob
from tests.programs import child_process

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


def test_a_file_that_cannot_be_opened_is_rejected_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "job.pkl"
    path.symlink_to(path)
    with pytest.raises(
        JobFileError, match=r"^cannot read the job in .*: Too many levels of symbolic links\. Pass another"
    ):
        find_cached_job(str(path), job_load, FakeJob(1))
    assert path.is_symlink()


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


def test_a_full_disk_is_reported_with_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "job.pkl"
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(tempfile, "mkstemp", lambda **options: (full, str(tmp_path / "temporary")))
    with pytest.raises(OSError, match=rf"No space left on device: '{path}'"):
        write_job_file(str(path), b"x")


def test_the_second_process_waits_for_the_lock(tmp_path: Path) -> None:
    path = str(tmp_path / "job.pkl")
    program = "import sys; from meshgate.jobs.saved import locked\nwith locked(sys.argv[1]): print('entered')"
    with contextlib.ExitStack() as held:
        held.enter_context(locked(path))
        with child_process([sys.executable, "-c", program, path], stdout=subprocess.PIPE) as second:
            with pytest.raises(subprocess.TimeoutExpired):
                second.wait(timeout=1)
            held.close()
            assert second.communicate(timeout=60) == (b"entered\n", None)


@pytest.fixture
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    RUNNING.clear()


@pytest.mark.usefixtures("_fresh")
def test_a_running_job_with_the_same_specification_is_found_without_a_warning(path: str) -> None:
    first, second = FakeJob(1), FakeJob(1)
    first.state(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert second.state(path).workers == (1, first.apply_id)
    assert second.active
    assert second.apply_id == first.apply_id
    assert len(RUNNING) == 1


@pytest.mark.usefixtures("_fresh")
def test_a_found_job_can_be_killed(path: str) -> None:
    first, second = FakeJob(1), FakeJob(1)
    first.state(path)
    second.state(path)
    second.kill()
    assert set() == RUNNING
    assert not second.active
    assert not os.path.exists(path)


@pytest.mark.usefixtures("_fresh")
def test_a_job_with_a_different_specification_is_ended_and_replaced_with_a_warning(path: str) -> None:
    FakeJob(1).state(path)
    job = FakeJob(2)
    with pytest.warns(JobCacheWarning, match="has a different specification; replacing it"):
        job.state(path)
    assert {job.apply_id} == RUNNING
    assert job_load(path).apply_id == job.apply_id


@pytest.mark.usefixtures("_fresh")
def test_a_job_that_has_ended_is_replaced_with_a_warning(path: str) -> None:
    FakeJob(1).state(path)
    RUNNING.clear()
    job = FakeJob(1)
    with pytest.warns(JobCacheWarning, match="has ended; starting a new one"):
        job.state(path)
    assert job_load(path).apply_id == job.apply_id


@pytest.mark.usefixtures("_fresh")
def test_a_foreign_file_is_kept_as_a_backup_and_replaced_with_a_warning(path: str) -> None:
    os.makedirs(os.path.dirname(path))
    Path(path).write_bytes(foreign := pickle.dumps({"a": 1}))
    Path(path).chmod(0o600)
    job = FakeJob(1)
    with pytest.warns(JobCacheWarning, match=r"it was not loaded. Moving it to .*\.replaced and starting a new job"):
        job.state(path)
    assert Path(f"{path}.replaced").read_bytes() == foreign
    assert job_load(path).apply_id == job.apply_id


@pytest.mark.usefixtures("_fresh")
def test_a_file_that_never_was_a_job_is_neither_moved_nor_replaced(tmp_path: Path) -> None:
    notes, directory, private = tmp_path / "notes", tmp_path / "directory", tmp_path / "private"
    notes.write_text("of the user")
    directory.mkdir()
    private.write_text("of the user")
    private.chmod(0o600)
    for path in (notes, directory, private):
        with pytest.raises(JobFileError, match="Pass another cached_path"):
            FakeJob(1).state(str(path))
    assert sorted(os.listdir(tmp_path)) == ["directory", "notes", "private"]
    assert set() == RUNNING


@pytest.mark.usefixtures("_fresh")
def test_the_job_of_another_machine_is_neither_ended_nor_replaced(path: str, tmp_path: Path) -> None:
    """The directory may be shared, and seems to be that of a gateway that has ended."""
    (temporary := tmp_path / "temporary").mkdir()
    record = GatewayRecord(
        apply_id="1234", url="ws://127.0.0.1:1", token="", pid=1, started="login2:0/boot/1/5", directory=str(temporary)
    )
    kind = "meshgate.jobs.process:ProcessJob"
    saved = SavedJob(kind=kind, apply_id="1234", spec={"meshes": {"workers": 1}}, allocation=asdict(record))
    write_job_file(path, saved.to_bytes())
    for use in (lambda: ProcessJob({"workers": 1}).state(path), lambda: job_load(path), lambda: find_job(path)):
        with pytest.raises(JobError, match="job 1234 was started on login2, which is another machine or container"):
            use()
    assert Path(path).read_bytes() == saved.to_bytes()
    assert temporary.exists()


@pytest.mark.usefixtures("_fresh")
def test_a_job_that_does_not_answer_is_not_replaced_and_the_error_says_how_to_go_on(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeJob(1).state(path)

    def fail(self: FakeJob) -> bool:
        raise ConnectionFailedError("the login node is down")

    monkeypatch.setattr(FakeJob, "_is_running", fail)
    with pytest.raises(ConnectionFailedError, match=r"FakeJob in .* is still running: the login node.*remove the file"):
        FakeJob(1).state(path)
    assert job_load(path).apply_id in RUNNING


@pytest.mark.usefixtures("_fresh")
def test_a_warning_points_at_the_program(path: str) -> None:
    FakeJob(1).state(path)
    RUNNING.clear()
    with pytest.warns(JobCacheWarning) as warned:
        FakeJob(1).state(path)
    assert warned[0].filename == __file__


@pytest.mark.usefixtures("_fresh")
def test_an_old_job_that_cannot_be_ended_does_not_stop_the_new_one(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeJob(1).state(path)

    def fail(self: FakeJob) -> None:
        raise ConnectionError("unreachable")

    monkeypatch.setattr(FakeJob, "_kill", fail)
    job = FakeJob(2)
    with pytest.warns(JobCacheWarning) as warned:
        job.state(path)
    message = str(warned[-1].message)
    assert message.startswith(f"cannot end the FakeJob in {path}: ConnectionError: unreachable.")
    assert job.active


@pytest.mark.usefixtures("_fresh")
def test_a_saved_job_that_was_never_applied_is_ignored(path: str) -> None:
    FakeJob(1).dump(path)
    assert find_cached_job(path, job_load, FakeJob(1)) is None
    job = FakeJob(1)
    job.state(path)
    assert job_load(path).apply_id == job.apply_id


@pytest.mark.usefixtures("_fresh")
def test_a_file_that_holds_another_allocation_is_not_removed(path: str) -> None:
    job = FakeJob(1)
    job.state(path)
    remove_job_file(path, "another")
    assert os.path.exists(path)
    remove_job_file(path, job.apply_id)
    assert not os.path.exists(path)


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("path", ["/proc/job.pkl", "/proc/jobs/job.pkl"])
def test_a_job_that_cannot_be_saved_is_not_started(path: str) -> None:
    with pytest.raises(JobFileError, match=r"the job cannot be saved in /proc.*cached_path=None"):
        FakeJob(1).state(path)
    assert set() == RUNNING
