"""What ranks print arrives in a file per rank: whole lines, in order, each once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshgate.session.output import log_files
from meshgate.session.output.log_files import MAX_NAME, LogFiles, folder_name
from meshgate_wire.messages import OutputLine


def line(text: str, *ranks: int, **fields: Any) -> OutputLine:
    fields = {"stream": "stdout", "mesh": "trainers", "count": max(len(ranks), 1), **fields}
    return OutputLine(text=text, ranks=ranks, **fields)


def written(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*.log")}


def test_each_rank_has_a_file_with_both_of_its_streams_in_order(tmp_path: Path) -> None:
    files = LogFiles(str(tmp_path / "new" / "logs"))
    files.write([line("step 1", 0, 1), line("careful", 1, stream="stderr")])
    files.write([line("step 2", 1), line("hello", 0, mesh="loaders")])
    files.close()
    assert written(tmp_path / "new" / "logs") == {
        "trainers/0.log": "step 1\n",
        "trainers/1.log": "step 1\ncareful\nstep 2\n",
        "loaders/0.log": "hello\n",
    }


def test_all_ranks_of_a_folded_line_get_it(tmp_path: Path) -> None:
    files = LogFiles(str(tmp_path))
    assert files.write([line("a", *range(64), more_ranks=((64, 98), (100, 100)), count=100)]) == []
    files.close()
    found = written(tmp_path)
    assert set(found.values()) == {"a\n"}
    assert set(found) == {f"trainers/{rank}.log" for rank in [*range(99), 100]}


def test_more_files_than_may_be_open_keep_all_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "MAX_OPEN", 3)
    files, before = LogFiles(str(tmp_path)), len(os.listdir("/dev/fd"))
    for step in range(4):
        files.write([line(f"step {step}", *range(10))])
        assert len(os.listdir("/dev/fd")) <= before + 3
    files.close()
    assert written(tmp_path) == {f"trainers/{rank}.log": "step 0\nstep 1\nstep 2\nstep 3\n" for rank in range(10)}


def test_parts_of_a_line_are_joined_and_never_mixed_with_another(tmp_path: Path) -> None:
    files = LogFiles(str(tmp_path))
    files.write([line("lo", 0, end="")])
    files.write([line("ss", 0, end=""), line(" 0.5", 0)])
    files.write([line("half", 0, end=""), line("a warning", 0, stream="stderr"), line("the rest", 0)])
    files.write([line("the end of one mesh", 0, procs=3, end=""), line("the next", 0, procs=4)])
    files.close()
    shown = ["loss 0.5", "half", "a warning", "the rest", "the end of one mesh", "the next"]
    assert written(tmp_path) == {"trainers/0.log": "".join(f"{each}\n" for each in shown)}


def test_of_a_progress_bar_the_last_state_is_written(tmp_path: Path) -> None:
    files = LogFiles(str(tmp_path))
    files.write([line("10%", 0, end="\r"), line("20%", 0, end="\r"), line("30%", 0)])
    files.close()
    assert written(tmp_path) == {"trainers/0.log": "30%\n"}


def test_lines_of_the_gateway_are_in_no_file(tmp_path: Path) -> None:
    files = LogFiles(str(tmp_path))
    files.write([line("host workers-0 is back", mesh="meshgate")])
    files.close()
    assert written(tmp_path) == {}


def test_a_program_that_is_run_again_continues_the_files(tmp_path: Path) -> None:
    for run in ("first", "second"):
        files = LogFiles(str(tmp_path))
        files.write([line(f"{run} run", 0), line("killed in a li", 0, end="")])
        files.close()
    whole = "first run\nkilled in a li\nsecond run\nkilled in a li"
    assert written(tmp_path) == {"trainers/0.log": whole}


def test_a_mesh_of_processes_has_one_folder_whatever_its_lines_are_labelled_with(tmp_path: Path) -> None:
    files = LogFiles(str(tmp_path), lambda procs: {3: "gpus", 4: "anon"}.get(procs, ""))
    files.write([line("a", 0, procs=3), line("b", 0, procs=3, mesh="evaluators")])
    files.write([line("a", 1, procs=4), line("b", 1, procs=4, mesh="anon"), line("c", 0, procs=5, mesh="")])
    files.close()
    assert written(tmp_path) == {"gpus/0.log": "a\nb\n", "trainers/1.log": "a\nb\n", "anon/0.log": "c\n"}


@pytest.mark.parametrize(
    ("mesh", "folder"),
    [
        ("trainers", "trainers"),
        ("größe_2-a.b", "größe_2-a.b"),
        ("a/b", "a%2Fb"),
        ("..", "%2E."),
        (".git", "%2Egit"),
        ("a b\n", "a%20b%0A"),
        ("a%2Fb", "a%252Fb"),
        ("", "%"),
    ],
)
def test_the_name_of_a_mesh_is_safe_as_that_of_a_folder(mesh: str, folder: str) -> None:
    assert folder_name(mesh) == folder


@given(st.text(max_size=256), st.text(max_size=256))
def test_two_meshes_never_share_a_folder(mesh: str, other: str) -> None:
    assert (folder_name(mesh) == folder_name(other)) == (mesh == other)
    assert len(folder_name(mesh).encode()) <= MAX_NAME + 17
    assert os.path.basename(folder_name(mesh)) == folder_name(mesh) not in ("", ".", "..")


def test_a_directory_that_is_made_is_left_out_of_git_and_of_the_code_sync(tmp_path: Path) -> None:
    LogFiles(str(tmp_path / "logs"))
    assert (tmp_path / "logs" / ".gitignore").read_text() == "*\n"
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "notes.txt").touch()
    LogFiles(str(tmp_path / "own"))
    assert os.listdir(tmp_path / "own") == ["notes.txt"]


def test_a_path_that_cannot_be_a_directory_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=rf"cannot write what ranks print to {tmp_path}/file.*MESHGATE_LOG_DIR"):
        LogFiles(str(tmp_path / "file"))


class FullDisk:
    """Takes ``space`` bytes, then raises as a full disk does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, space: int) -> None:
        self.space = space
        self._write = os.write
        monkeypatch.setattr(log_files.os, "write", self.write)

    def write(self, descriptor: int, data: memoryview) -> int:
        if not self.space:
            raise OSError(28, "No space left on device")
        count = self._write(descriptor, data[: self.space])
        self.space -= count
        return count


def test_a_full_disk_is_reported_once_and_the_file_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = LogFiles(str(tmp_path))
    files.write([line("before", 0), line("in a li", 0, end="")])
    disk = FullDisk(monkeypatch, 3)
    (notice,) = files.write([line("lost", 0), line("lost, too", 0, 1)])
    assert f"{tmp_path}/trainers/0.log: No space left on device. The program continues" in notice.text
    assert files.write([line("lost", 0)]) == []
    assert written(tmp_path) == {"trainers/0.log": "before\nin a li", "trainers/1.log": ""}
    disk.space = 10_000
    assert files.write([line("after", 0)]) == files.write([line("once", 0)]) == []
    files.close()
    missing = "missing here, because writing failed: No space left on device"
    assert written(tmp_path) == {
        "trainers/0.log": f"before\nin a li\n[meshgate] 3 lines are {missing}\nafter\nonce\n",
        "trainers/1.log": f"[meshgate] 1 line is {missing}\n",
    }


def test_a_disk_that_is_full_again_is_reported_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = LogFiles(str(tmp_path))
    disk = FullDisk(monkeypatch, 0)
    assert len(files.write([line("lost", 0)])) == 1
    disk.space = 10_000
    assert files.write([line("a", 0)]) == []
    disk.space = 0
    assert len(files.write([line("lost", 0)])) == 1
    files.close()
