"""The wheel has every module, and the client works without the gateway's dependencies."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from platform import machine

import pytest

from tests.programs import ROOT
from tests.test_structure import SOURCE_ROOTS

GATEWAY_DEPENDENCIES = {"torchmonarch", "pydantic-settings"}

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


@pytest.mark.slow
@pytest.mark.timeout(900)  # downloads the tools, and builds as a release does
def test_what_a_release_consists_of_is_complete_and_the_client_works_alone(tmp_path: Path) -> None:
    """One test, as what ``.ci/dist`` builds takes long, and several workers would each build it."""
    out = tmp_path / "dist"
    environment = {**os.environ, "VENVS": str(tmp_path), "PYTHON": sys.executable}
    parts = ["client", "chart"] if (sys.platform, machine()) == ("linux", "x86_64") else ["client"]
    command = [ROOT / ".ci" / "dist", out, *parts]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("PASSED") == 2  # what package indexes render
    (wheel,) = out.glob("*.whl")
    check_sbom(out)
    check_sdist(out)
    check_wheel(wheel)
    if "chart" in parts:
        check_chart(out, version=wheel.name.split("-")[1])
    check_client(tmp_path / "client" / "bin", version=wheel.name.split("-")[1])


def check_sbom(built: Path) -> None:
    """It lists the dependencies at the pinned versions."""
    found = json.loads((built / "meshgate-client.cdx.json").read_text())
    assert found["metadata"]["component"]["name"] == "meshgate"
    versions = {each["name"].replace("_", "-"): each["version"] for each in found["components"]}
    pins = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert {"cloudpickle", "kubernetes", "pydantic", "uvloop", "websockets"} <= set(versions)
    assert not GATEWAY_DEPENDENCIES & set(versions)
    assert {name: pins.get(name.lower()) for name in versions} == versions


def check_sdist(built: Path) -> None:
    """It has the source roots and no other folder."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        paths = [Path(name).parts[1:] for name in archive.getnames()]
    assert {path[0] for path in paths if len(path) > 1} == set(SOURCE_ROOTS)


def check_wheel(wheel: Path) -> None:
    """It has every module and nothing else."""
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


def check_chart(built: Path, version: str) -> None:
    """It has every file of the chart."""
    chart = ROOT / "deploy" / "helm" / "meshgate"
    with tarfile.open(built / f"meshgate-{version}.tgz") as archive:
        names = set(archive.getnames())
    assert names == {str(path.relative_to(chart.parent)) for path in chart.rglob("*") if path.is_file()}


def check_client(programs: Path, version: str) -> None:
    """Without extras, it imports without torchmonarch and the gateway."""
    names = "import importlib.metadata as m, json; print(json.dumps([each.name.lower() for each in m.distributions()]))"
    listed = subprocess.run([programs / "python", "-I", "-c", names], check=True, capture_output=True)
    installed = set(json.loads(listed.stdout))
    assert "meshgate" in installed
    assert not GATEWAY_DEPENDENCIES & installed

    packages = ("meshgate", "meshgate_processes", "meshgate_sync", "meshgate_wire")
    ran = subprocess.run(
        [programs / "python", "-I", "-c", IMPORT_ALL, *packages], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert {"meshgate.proxies.client", "meshgate.cli.app", "meshgate_wire.session"} <= set(json.loads(ran.stdout))
    printed = subprocess.run([programs / "meshgate", "version"], check=True, capture_output=True)
    assert printed.stdout.decode().strip() == version
