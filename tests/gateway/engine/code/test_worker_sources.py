from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from meshgate_gateway.engine.code.worker_sources import AGENT_MODULES, PROCESS_MODULES, imported_modules, worker_sources


@pytest.mark.parametrize("entry_points", [AGENT_MODULES, PROCESS_MODULES])
def test_modules_for_workers_import_only_stdlib_modules(entry_points: tuple[str, ...]) -> None:
    for name, source in worker_sources(entry_points).items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules = [str(node.module)]
            else:
                continue
            foreign = [each for each in modules if each.split(".")[0] not in sys.stdlib_module_names]
            assert not foreign, f"{name} imports {foreign}"


def test_every_imported_module_is_included() -> None:
    modules = worker_sources(AGENT_MODULES)
    assert all(used in modules for name, source in modules.items() for used in imported_modules(name, source))


def test_the_modules_run_without_meshgate_installed() -> None:
    program = f"""
import sys
from importlib import import_module
for name in ("meshgate_sync", "meshgate_wire", "meshgate", "pydantic", "monarch"):
    sys.modules[name] = None
{import_sources_source()}
package = import_sources({dict(worker_sources(AGENT_MODULES))!r})
agent = import_module(package + ".distribution.agent")
import tempfile
agent.HostAgent("a", secret=b"s" * 32, owner="o", home=tempfile.mkdtemp()).stop()
print("it runs")
"""
    done = subprocess.run([sys.executable, "-I", "-"], input=program, capture_output=True, text=True, check=False)
    assert done.stdout == "it runs\n", done.stderr


def import_sources_source() -> str:
    """The source of ``import_sources`` and of the standard-library imports of its module."""
    from meshgate_gateway.engine.on_worker import process as on_worker

    tree = ast.parse(Path(str(on_worker.__file__)).read_text())
    kept = [
        node
        for node in tree.body
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.AnnAssign))
        or (isinstance(node, ast.FunctionDef) and node.name == "import_sources")
    ]
    return ast.unparse(ast.Module([node for node in kept if not _left_out(node)], []))


def _left_out(node: ast.stmt) -> bool:
    """Whether ``node`` imports something that the program does not need or cannot import."""
    return isinstance(node, ast.ImportFrom) and node.module in ("__future__", "meshgate_sync.store.place")
