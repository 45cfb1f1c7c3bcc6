from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from meshgate.code_sync.import_paths import driver_import_paths, driver_script
from tests.test_structure import SOURCE_ROOTS


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
