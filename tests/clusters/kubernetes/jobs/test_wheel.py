"""The wheel that a gateway's pod installs is that of the meshgate that runs here."""

from __future__ import annotations

import bz2
import importlib.metadata
import io
import os
import re
import zipfile
from pathlib import Path

import pytest

from meshgate_kubernetes.errors import KubernetesError
from meshgate_kubernetes.jobs import wheel
from meshgate_kubernetes.jobs.wheel import MOST, PACKAGES, packed_wheel

ROOT = Path(__file__).parents[4]


def test_it_has_the_packages_of_a_release() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    released = re.search(r"\[tool\.hatch\.build\.targets\.wheel\][^]]*packages = \[(.*?)\]", project, re.DOTALL)
    assert released is not None
    assert set(PACKAGES) == set(re.findall(r"/(\w+)\"", released[1]))


def test_it_has_every_file_of_a_package_and_the_metadata_by_which_pip_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wheel, "PACKAGES", ("meshgate_wire",))
    archive = zipfile.ZipFile(io.BytesIO(bz2.decompress(packed_wheel())))
    sources = ROOT / "wire" / "meshgate_wire"
    files = {f"meshgate_wire/{path.relative_to(sources)}" for path in sources.rglob("*") if path.is_file()}
    names = set(archive.namelist())
    assert {each for each in files if "__pycache__" not in each} == {each for each in names if ".dist-info" not in each}
    (metadata,) = (each for each in names if each.endswith(".dist-info/METADATA"))
    assert b"Provides-Extra: gateway" in archive.read(metadata)


def test_it_fits_into_a_secret_with_room_to_grow() -> None:
    assert len(packed_wheel()) < 0.8 * MOST


def test_one_that_does_not_fit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "PACKAGES", ("meshgate_processes",))
    monkeypatch.setattr(wheel, "MOST", 100)
    with pytest.raises(KubernetesError, match=r"too large .* gateway=Compute\(image=…\)"):
        packed_wheel()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "PACKAGES", ("meshgate_nothing",))
    with pytest.raises(KubernetesError, match="it has no package meshgate_nothing"):
        packed_wheel()


def test_files_older_than_the_format_are_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = tmp_path / "meshgate_old" / "__init__.py"
    module.parent.mkdir()
    module.touch()
    os.utime(module, (0, 0))  # as images that are built reproducibly have them
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(wheel, "PACKAGES", ("meshgate_old",))
    archive = zipfile.ZipFile(io.BytesIO(bz2.decompress(packed_wheel())))
    assert "meshgate_old/__init__.py" in archive.namelist()


def test_a_meshgate_that_is_not_installed_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(KubernetesError, match=r"not installed\. Install it with pip, or name an image"):
        packed_wheel()
