from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from meshgate.code_sync.project import (
    RUN_PROJECT,
    Tree,
    directories_outside,
    driver_import_paths,
    driver_script,
    find_tree,
    ignored_modules,
    including_rules,
    modules_beside,
)
from meshgate.code_sync.push import CodeSync
from meshgate.errors import JobError
from meshgate.proxies.client import Client
from meshgate_sync.tree.scan import Scanner
from tests.sync.trees import paths
from tests.test_structure import SOURCE_ROOTS


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


def test_the_project_of_a_submitted_program_is_its_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project/recipes").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project/recipes")
    monkeypatch.setenv(RUN_PROJECT, str(tmp_path / "project"))
    recipes = str(tmp_path / "project/recipes")
    tree = find_tree(None, [recipes], f"{recipes}/train.py")
    assert (tree.top, tree.paths) == ((tmp_path / "project").resolve(), ("recipes",))


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
    repeated = [tmp_path / name for name in ("two", "one", "two/inner", "one")]
    tree = find_tree(repeated, [])
    assert (tree.top, tree.parts) == (tmp_path.resolve(), ("two", "one"))
    assert find_tree(repeated[::2], []) == find_tree([tmp_path / "two"], [])


def test_several_directories_may_be_below_the_home_or_root_directory_but_not_one_of_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("project", "library"):
        (tmp_path / name).mkdir()
    tree = find_tree(["~/project", "~/library"], [str(tmp_path / "project")])
    assert (tree.top, tree.parts, tree.paths) == (tmp_path.resolve(), ("project", "library"), ("project",))
    assert find_tree(["~/project", "/usr"], []).top == Path("/")
    with pytest.raises(ValueError, match="it is the home directory"):
        find_tree(["~", "/usr"], [])
    with pytest.raises(ValueError, match="it is the root directory"):
        find_tree(["~/project", "/"], [])


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


@pytest.fixture
def directories(tmp_path: Path) -> tuple[str, str, str]:
    for name in ("script", "library", "here"):
        (tmp_path / name).mkdir()
    return str(tmp_path / "script"), str(tmp_path / "library"), str(tmp_path / "here")


def test_the_drivers_own_paths_keep_their_order_and_precede_the_working_directory(
    directories: tuple[str, str, str],
) -> None:
    script, library, here = directories
    assert driver_import_paths([script, library], here) == [script, library, here]
    assert driver_import_paths(["", library, script], here) == [here, library, script]


def test_the_interpreters_paths_are_excluded(directories: tuple[str, str, str]) -> None:
    script, _, here = directories
    fresh = subprocess.run(
        [sys.executable, "-Ic", "import json, sys; print(json.dumps(sys.path))"], capture_output=True, check=True
    )
    interpreter_paths = json.loads(fresh.stdout)
    assert any("site-packages" in path for path in interpreter_paths)
    editable = [path for path in interpreter_paths if Path(path).name in SOURCE_ROOTS]
    assert driver_import_paths([script, *interpreter_paths], here) == [script, *editable, here]


def test_paths_are_absolute_and_without_duplicates(directories: tuple[str, str, str]) -> None:
    script, library, here = directories
    assert driver_import_paths([script, "../library", script, library], here) == [script, library, here]


def test_a_deleted_working_directory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(JobError, match="the working directory of this program has been deleted: change to one"):
        driver_import_paths()
    with pytest.raises(JobError, match="has been deleted"):
        find_tree(None, [str(tmp_path)])


def test_missing_paths_and_paths_with_a_separator_are_excluded(tmp_path: Path) -> None:
    odd = tmp_path / "a:b"
    odd.mkdir()
    assert driver_import_paths([str(tmp_path / "missing"), str(odd)], str(tmp_path)) == [str(tmp_path)]


def test_directories_of_modules_found_by_an_editable_install_are_included(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "core/editable_package").mkdir(parents=True)
    (tmp_path / "core/editable_package/__init__.py").write_text("")
    file = str(tmp_path / "core/editable_package/__init__.py")
    spec = importlib.util.spec_from_file_location("editable_package", file)
    assert spec is not None
    monkeypatch.setitem(sys.modules, "editable_package", importlib.util.module_from_spec(spec))
    assert str(tmp_path / "core") in driver_import_paths()


def test_a_test_runner_is_not_the_users_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert driver_script() is None
    for file, found in ((str(script), str(script)), (pytest.__file__, None), (f"{sys.exec_prefix}/bin/pytest", None)):
        main.__file__ = file
        assert driver_script() == found


def test_directories_outside_of_the_tree_are_found_if_modules_were_loaded_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("project", "elsewhere", "unused"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"outside_of_{name}.py").write_text("")
        monkeypatch.syspath_prepend(str(tmp_path / name))
    for name in ("project", "elsewhere"):
        importlib.import_module(f"outside_of_{name}")
    for tree in (Tree((tmp_path / "project").resolve()), Tree(tmp_path.resolve(), ("project", "library"))):
        found = directories_outside(tree)
        assert [path for path in found if Path(path).is_relative_to(tmp_path)] == [str(tmp_path / "elsewhere")]
    for name in ("project", "elsewhere"):
        del sys.modules[f"outside_of_{name}"]


def test_a_directory_above_the_tree_is_not_outside_because_of_what_is_in_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project/inside_a_project.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path / "project"))
    importlib.import_module("inside_a_project")
    found = directories_outside(Tree((tmp_path / "project").resolve()))
    del sys.modules["inside_a_project"]
    assert str(tmp_path) not in found


def test_modules_beside_a_program_are_those_of_its_directory_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("beside_a_program", "package_beside", "below/not_beside"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "below"))
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("beside_a_program", "package_beside", "not_beside")
    for name in names:
        importlib.import_module(name)
    assert modules_beside(str(tmp_path)) == ["beside_a_program", "package_beside"]
    for name in names:
        del sys.modules[name]


def test_ignored_modules_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: Client) -> None:
    top = tmp_path.resolve()
    (top / "ignored_in_test").mkdir()
    for name in ("__init__", "model", "_version"):
        (top / f"ignored_in_test/{name}.py").write_text("")
    (top / ".gitignore").write_text("_version.py\n")
    monkeypatch.syspath_prepend(str(top))
    names = ["ignored_in_test", "ignored_in_test.model", "ignored_in_test._version"]
    code = CodeSync(client, Tree(top))
    try:
        for name in names:
            importlib.import_module(name)
        code.push(wait=False)
        assert ignored_modules(code.tree, code.ignores) == [("ignored_in_test._version", "ignored_in_test/_version.py")]
        (top / ".meshgateignore").write_text("!/ignored_in_test/_version.py\n")
        code.push(wait=False)
        assert ignored_modules(code.tree, code.ignores) == []
        assert ignored_modules(Tree(top, parts=("other",)), lambda path: True) == []
    finally:
        code.close()
        for name in names:
            sys.modules.pop(name, None)


def test_the_advised_rules_include_the_modules_and_nothing_else_in_their_directories(tmp_path: Path) -> None:
    (tmp_path / "src/out/deep[1]").mkdir(parents=True)
    modules = ["_version.py", "src/out/a.py", "src/out/deep[1]/b.py", "src/out/deep[1]/c .py"]
    for name in [*modules, "src/out/secret", "src/out/deep[1]/secret"]:
        (tmp_path / name).write_text("")
    (tmp_path / ".gitignore").write_text("out/\n_version.py\n")
    scanner = Scanner(tmp_path)
    scanner.scan()
    rules = including_rules(Tree(tmp_path), modules, scanner.ignores)
    (tmp_path / ".meshgateignore").write_text("\n".join(rules))
    files = {path.decode() for path in paths(scanner.scan().tree) if (tmp_path / path.decode()).is_file()}
    assert files == {".gitignore", ".meshgateignore", *modules}
