from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from meshgate_gateway.engine.library import OF_HOSTS, OF_PROCESSES, library, siblings


@pytest.mark.parametrize("entry_points", [OF_HOSTS, OF_PROCESSES])
def test_what_goes_to_workers_needs_nothing_but_the_standard_library(entry_points: tuple[str, ...]) -> None:
    for name, source in library(entry_points).items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules = [str(node.module)]
            else:
                continue
            foreign = [each for each in modules if each.split(".")[0] not in sys.stdlib_module_names]
            assert not foreign, f"{name} imports {foreign}"


def test_the_list_is_closed_under_imports() -> None:
    modules = library(OF_HOSTS)
    assert all(used in modules for source in modules.values() for used in siblings(source))


def test_the_modules_run_where_meshgate_cannot_be_imported() -> None:
    program = f"""
import sys
from importlib import import_module
for name in ("meshgate_sync", "meshgate_wire", "meshgate", "pydantic", "monarch"):
    sys.modules[name] = None
{on_worker_source()}
package = package_of({dict(library(OF_HOSTS))!r})
agent = import_module(package + ".agent")
import tempfile
agent.HostAgent("a", secret=b"s" * 32, owner="o", home=tempfile.mkdtemp()).stop()
print("it runs")
"""
    done = subprocess.run([sys.executable, "-I", "-"], input=program, capture_output=True, text=True, check=False)
    assert done.stdout == "it runs\n", done.stderr


def on_worker_source() -> str:
    """``package_of`` with the imports of its module, which need the standard library alone."""
    from meshgate_gateway.engine import on_worker

    tree = ast.parse(Path(str(on_worker.__file__)).read_text())
    kept = [
        node
        for node in tree.body
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.AnnAssign))
        or (isinstance(node, ast.FunctionDef) and node.name == "package_of")
    ]
    return ast.unparse(ast.Module([node for node in kept if not _future(node)], []))


def _future(node: ast.stmt) -> bool:
    """Imports that are not made there; what is of ``meshgate_sync`` goes along by value."""
    return isinstance(node, ast.ImportFrom) and node.module in ("__future__", "meshgate_sync.place")
