from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from meshgate.jobs.import_paths import driver_import_paths, driver_script


@pytest.fixture
def places(tmp_path: Path) -> tuple[str, str, str]:
    for name in ("script", "library", "here"):
        (tmp_path / name).mkdir()
    return str(tmp_path / "script"), str(tmp_path / "library"), str(tmp_path / "here")


def test_the_drivers_own_places_in_its_order_then_its_directory(places: tuple[str, str, str]) -> None:
    script, library, here = places
    assert driver_import_paths([script, library], here) == [script, library, here]
    assert driver_import_paths(["", library, script], here) == [here, library, script]


def test_the_interpreters_places_are_left_out(places: tuple[str, str, str]) -> None:
    script, _, here = places
    fresh = subprocess.run(
        [sys.executable, "-Ic", "import json, sys; print(json.dumps(sys.path))"], capture_output=True, check=True
    )
    everyones = json.loads(fresh.stdout)
    assert any("site-packages" in path for path in everyones)
    editable = [path for path in everyones if Path(path).name in ("client", "gateway", "sync", "worker_image")]
    assert driver_import_paths([script, *everyones], here) == [script, *editable, here]


def test_each_once_and_absolute(places: tuple[str, str, str]) -> None:
    script, library, here = places
    assert driver_import_paths([script, "../library", script, library], here) == [script, library, here]


def test_what_cannot_be_there_or_be_written_down_is_left_out(tmp_path: Path) -> None:
    odd = tmp_path / "a:b"
    odd.mkdir()
    assert driver_import_paths([str(tmp_path / "missing"), str(odd)], str(tmp_path)) == [str(tmp_path)]


def test_where_modules_are_from_that_an_editable_install_has_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "core/found_otherwise").mkdir(parents=True)
    (tmp_path / "core/found_otherwise/__init__.py").write_text("")
    file = str(tmp_path / "core/found_otherwise/__init__.py")
    spec = importlib.util.spec_from_file_location("found_otherwise", file)
    assert spec is not None
    monkeypatch.setitem(sys.modules, "found_otherwise", importlib.util.module_from_spec(spec))
    assert str(tmp_path / "core") in driver_import_paths()


def test_a_test_runner_is_no_script_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert driver_script() is None
    for file, found in ((str(script), str(script)), (pytest.__file__, None), (f"{sys.exec_prefix}/bin/pytest", None)):
        main.__file__ = file
        assert driver_script() == found
