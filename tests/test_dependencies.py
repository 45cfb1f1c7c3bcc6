"""Each distribution that the product imports is declared in pyproject.toml, with the reason."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

from tests.programs import ROOT
from tests.test_structure import PACKAGES, name_of

OURS = {package.rpartition("/")[2] for package in PACKAGES}
installed = cache(packages_distributions)  # it reads files of every package, which other tests need not wait for


def normalized(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def declared(project: str) -> dict[str, bool]:
    """The distributions of the lists of dependencies, and whether a comment, behind or above, says why."""
    found: dict[str, bool] = {}
    lists = re.search(r"^dependencies = \[$.*?(?=^\[project\.scripts\])", project, re.MULTILINE | re.DOTALL)
    assert lists is not None
    above = False
    for line in lists[0].splitlines():
        for name in re.findall(r'"([\w.-]+)[^"]*"', line.partition("#")[0]):
            found[normalized(name)] = found.get(normalized(name), False) or "#" in line or above
        above = line.strip().startswith("#")
    return found


def imported(source: str) -> Iterator[str]:
    """The top-level packages that a module imports, those for types and in functions included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").partition(".")[0]


def importers() -> dict[str, Path]:
    """The packages of others that the product imports, and a module that does."""
    return {
        name: module
        for package in PACKAGES
        for module in sorted((ROOT / package).rglob("*.py"))
        for name in imported(module.read_text())
        if name not in OURS and name not in sys.stdlib_module_names
    }


def test_every_import_of_another_distribution_is_declared_with_its_reason() -> None:
    reasons = declared((ROOT / "pyproject.toml").read_text())
    for name, module in importers().items():
        distributions = [normalized(each) for each in installed().get(name, [name])]
        known = [each for each in distributions if each in reasons]
        where = f"{name_of(module)} imports {name}, of {' or '.join(distributions)}"
        assert known, f"{where}, which pyproject.toml does not declare: add it there with a comment that says why"
        assert any(reasons[each] for each in known), f"{where}: say in a comment in pyproject.toml why it is needed"


def test_imports_in_functions_and_for_types_count() -> None:
    source = "if TYPE_CHECKING:\n    from a.b import c\ndef f():\n    import d.e, g\nfrom . import h\n"
    assert set(imported(source)) == {"a", "d", "g"}


def test_a_comment_behind_or_above_is_a_reason() -> None:
    project = (
        'dependencies = [\n    "a>=1",  # why\n    # why\n    "b_b>=2",\n    "c; x == \'y\'",\n]\n'
        'extra = ["d"]  # why\n[project.scripts]\ne = "e:e"\n'
    )
    assert declared(project) == {"a": True, "b-b": True, "c": False, "d": True}
