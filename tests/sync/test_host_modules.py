"""What hosts run has to work where there is nothing but a Python: it is held to the standard library here."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import meshgate_sync

SOURCES = Path(meshgate_sync.__file__).parent
ENTRY_POINTS = ("agent", "serve", "home")


def imports(name: str) -> tuple[set[str], set[str]]:
    """The modules of this package that module ``name`` imports, and the top-level packages besides."""
    ours, others = set(), set()
    for node in ast.walk(ast.parse((SOURCES / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            others |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            (ours if node.level else others).add(node.module.split(".")[0])
    return ours, others


def host_modules() -> list[str]:
    found: set[str] = set()
    pending = set(ENTRY_POINTS)
    while pending:
        name = pending.pop()
        found.add(name)
        pending |= imports(name)[0] - found
    return sorted(found)


@pytest.mark.parametrize("name", host_modules())
def test_what_a_host_runs_imports_nothing_but_the_standard_library(name: str) -> None:
    assert imports(name)[1] <= sys.stdlib_module_names


def test_what_needs_more_stays_off_the_hosts() -> None:
    assert not {"scan", "ignore", "chunks", "compress", "protocol", "sender"} & set(host_modules())


def test_a_host_runs_without_any_installed_package(tmp_path: Path) -> None:
    for name in ("__init__", *host_modules()):
        (tmp_path / "meshgate_sync").mkdir(exist_ok=True)
        (tmp_path / "meshgate_sync" / f"{name}.py").write_bytes((SOURCES / f"{name}.py").read_bytes())
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from meshgate_sync.agent import HostAgent\n"
        f"agent = HostAgent('h', secret=b's', owner='o', home={str(tmp_path / 'home')!r})\n"
        "agent.stop(); agent.stop()\n"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True, timeout=60)
