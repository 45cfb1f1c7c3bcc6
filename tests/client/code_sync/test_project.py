from __future__ import annotations

from pathlib import Path

import pytest

from meshgate.code_sync.project import find_tree


def test_the_tree_is_the_git_root_with_the_drivers_import_paths_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "src").mkdir()
    monkeypatch.chdir(tmp_path / "src")
    tree = find_tree(None, [str(tmp_path / "src"), str(tmp_path), "/somewhere/else"])
    assert (tree.top, tree.parts, tree.paths) == (tmp_path.resolve(), (), ("src", ""))


@pytest.mark.parametrize("repository_here", [True, False])
def test_a_script_that_runs_in_another_directory_syncs_its_own_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository_here: bool
) -> None:
    (tmp_path / "project/.git").mkdir(parents=True)
    (tmp_path / "project/src").mkdir()
    (tmp_path / "here").mkdir()
    if repository_here:
        (tmp_path / "here/.git").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    script = str(tmp_path / "project/src/train.py")
    tree = find_tree(None, [str(tmp_path / "project/src"), str(tmp_path / "here")], script)
    assert (tree.top, tree.paths) == ((tmp_path / "project").resolve(), ("src",))


def test_without_git_the_project_is_the_directory_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project/package").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    script, program = tmp_path / "project/train.py", tmp_path / "project/package/train.py"
    assert find_tree(None, [str(script.parent), str(tmp_path)], str(script)).top == script.parent.resolve()
    monkeypatch.chdir(tmp_path / "project")  # python -m package.train
    assert find_tree(None, [str(script.parent)], str(program)).top == script.parent.resolve()


def test_a_repository_of_the_home_directory_does_not_make_it_a_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".git").mkdir()
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path / "data")
    assert find_tree(None, [str(tmp_path / "data")], str(tmp_path / "data/train.py")).top == tmp_path / "data"
    with pytest.raises(ValueError, match=r"it is the home directory.*sync_dirs"):
        find_tree(None, [str(tmp_path), str(tmp_path / "data")], str(tmp_path / "train.py"))


def test_a_directory_that_a_program_puts_first_is_its_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tools/.git").mkdir(parents=True)
    (tmp_path / "made").mkdir()
    monkeypatch.chdir(tmp_path / "made")
    tree = find_tree(None, [str(tmp_path / "made"), str(tmp_path / "tools")], str(tmp_path / "tools/make.py"))
    assert tree.top == (tmp_path / "made").resolve()


def test_the_directory_of_a_script_below_the_home_directory_is_a_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "project").mkdir()
    assert find_tree(None, [str(tmp_path / "project")], str(tmp_path / "project/train.py")).top.name == "project"
    with pytest.raises(ValueError, match="not a project directory"):
        find_tree(None, [str(tmp_path)])


def test_several_directories_are_parts_of_their_common_parent(tmp_path: Path) -> None:
    for name in ("one", "two/inner"):
        (tmp_path / name).mkdir(parents=True)
    tree = find_tree([tmp_path / "one", tmp_path / "two/inner"], [])
    assert (tree.top, tree.parts) == (tmp_path.resolve(), ("one", "two/inner"))


def test_the_home_directory_and_a_missing_directory_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a project directory"):
        find_tree([Path.home()], [])
    with pytest.raises(ValueError, match="not a directory"):
        find_tree([tmp_path / "missing"], [])
    with pytest.raises(ValueError, match="empty"):
        find_tree([], [])


def test_the_directory_for_temporary_files_is_no_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are those of many programs and users."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="it is the temporary directory, not a project directory"):
        find_tree(None, [str(tmp_path)], str(tmp_path / "train.py"))
    assert find_tree([str(tmp_path)], [str(tmp_path)], None).top == tmp_path.resolve()
