from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from meshgate.jobs.import_paths import driver_import_paths


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
