"""What hosts run imports nothing but the standard library, so that it works wherever Python does."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import meshgate_sync

SOURCES = Path(meshgate_sync.__file__).parent
ENTRY_POINTS = ("distribution.agent", "store.home")


def source_of(name: str) -> Path:
    return SOURCES / f"{name.replace('.', '/')}.py"


def imports(name: str) -> tuple[set[str], set[str]]:
    """The modules of this package that module ``name`` imports, and the top-level packages besides."""
    ours, others = set(), set()
    for node in ast.walk(ast.parse(source_of(name).read_text())):
        if isinstance(node, ast.Import):
            others |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            if node.level:
                ours.add(".".join([*name.split(".")[: -node.level], node.module]))
            else:
                others.add(node.module.split(".")[0])
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


def test_modules_that_need_more_are_not_run_on_hosts() -> None:
    needing_more = {"tree.scan", "tree.ignore", "tree.chunks"}
    needing_more |= {"upload.protocol", "upload.sender"}
    assert not needing_more & set(host_modules())


def test_a_host_runs_without_any_installed_package(tmp_path: Path) -> None:
    for file in [*SOURCES.rglob("__init__.py"), *map(source_of, host_modules())]:
        copy = tmp_path / "meshgate_sync" / file.relative_to(SOURCES)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from meshgate_sync.distribution.agent import HostAgent\n"
        f"agent = HostAgent('h', secret=b's', owner='o', home={str(tmp_path / 'home')!r})\n"
        "agent.stop(); agent.stop()\n"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True, timeout=60)
