"""The wheel has every module, and the client works without the gateway's dependencies."""

from __future__ import annotations

import json
import re
import subprocess
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.programs import ROOT
from tests.test_structure import SOURCE_ROOTS

GATEWAY_DEPENDENCIES = {"torchmonarch", "structlog", "pydantic-settings"}

IMPORT_ALL = """
import importlib, json, pkgutil, sys
imported = []
def load(name):
    module = importlib.import_module(name)
    imported.append(name)
    for found in pkgutil.iter_modules(getattr(module, "__path__", []), name + "."):
        if not found.name.endswith("__main__"):
            load(found.name)
for package in sys.argv[1:]:
    load(package)
import meshgate
for name in meshgate.__all__:
    getattr(meshgate, name)
assert "monarch" not in sys.modules and "meshgate_gateway" not in sys.modules
print(json.dumps(imported))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``.ci/dist`` builds, but for the images: the wheel from the sdist."""
    out = tmp_path_factory.mktemp("dist")
    ran = subprocess.run([ROOT / ".ci" / "dist", out, "client"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("PASSED") == 2  # what package indexes render
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.mark.timeout(900)
def test_the_sbom_lists_the_dependencies_at_the_pinned_versions(built: Path) -> None:
    found = json.loads((built / "meshgate-client.cdx.json").read_text())
    assert found["metadata"]["component"]["name"] == "meshgate"
    versions = {each["name"].replace("_", "-"): each["version"] for each in found["components"]}
    pins = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert {"cloudpickle", "kubernetes", "pydantic", "uvloop", "websockets"} <= set(versions)
    assert not GATEWAY_DEPENDENCIES & set(versions)
    assert {name: pins.get(name.lower()) for name in versions} == versions


@pytest.mark.timeout(900)
def test_the_sdist_has_the_source_roots_and_no_other_folder(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        paths = [Path(name).parts[1:] for name in archive.getnames()]
    assert {path[0] for path in paths if len(path) > 1} == set(SOURCE_ROOTS)


@pytest.mark.timeout(900)
def test_the_wheel_has_every_module_and_nothing_else(wheel: Path) -> None:
    expected = {
        str(path.relative_to(ROOT / root))
        for root in SOURCE_ROOTS
        for package in (ROOT / root).glob("meshgate*")
        for path in package.rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert expected <= names
    assert {name.partition("/")[0] for name in names} == {name.partition("/")[0] for name in expected}


@pytest.mark.timeout(900)
def test_the_bare_client_imports_without_torchmonarch_and_the_gateway(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    install = [python, "-m", "pip", "install", "-q", "--no-compile", "-c", str(ROOT / "constraints.txt"), str(wheel)]
    subprocess.run(install, check=True, capture_output=True, text=True)

    listed = subprocess.run([python, "-m", "pip", "list", "--format=json"], check=True, capture_output=True)
    installed = {package["name"].lower() for package in json.loads(listed.stdout)}
    assert "meshgate" in installed
    assert not GATEWAY_DEPENDENCIES & installed

    packages = ("meshgate", "meshgate_processes", "meshgate_sync", "meshgate_wire")
    ran = subprocess.run([python, "-I", "-c", IMPORT_ALL, *packages], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert {"meshgate.proxies.client", "meshgate.cli.app", "meshgate_wire.session"} <= set(json.loads(ran.stdout))
    version = subprocess.run([tmp_path / "venv" / "bin" / "meshgate", "version"], check=True, capture_output=True)
    assert version.stdout.decode().strip() == wheel.name.split("-")[1]
