"""The folders and the tests have the structure that CONTRIBUTING.md describes."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.programs import ROOT

PACKAGES = {  # package: where its tests are, below tests/
    "client/meshgate": "client",
    "clusters/meshgate_kubernetes": "clusters/kubernetes",
    "clusters/meshgate_slurm": "clusters/slurm",
    "gateway/meshgate_gateway": "gateway",
    "sync/meshgate_sync": "sync",
    "wire/meshgate_processes": "processes",
    "wire/meshgate_wire": "wire",
    "worker_image/meshgate_worker": "worker_image",
}
SOURCE_ROOTS = sorted({package.partition("/")[0] for package in PACKAGES})
FOLDERS = [path.parent for package in PACKAGES for path in sorted((ROOT / package).rglob("__init__.py"))]
MOST_FOLDERS = 12  # at the top level, where a newcomer looks first
MOST_MODULES = 25
ENTRY_POINTS = {"__init__.py", "__main__.py"}  # run by other tests
SAYS_WHAT_IT_NEVER_DOES = re.compile(r"\b(never|nothing|no|not|only|alone|without)\b", re.IGNORECASE)

LIST_THEIR_NAMES = {"client/meshgate/config.py", "client/meshgate/errors.py", "sync/meshgate_sync/errors.py"}
"""Modules whose names are documented, or compared with another list."""

TESTED_ELSEWHERE = {
    "gateway/meshgate_gateway/on_slurm.py": "tests/slurm/test_ends.py",
}
"""Modules that only work with Monarch's processes or with Slurm, and the tests that run them there."""


_FOR_TYPE_CHECKERS = "proxies/static_types.py is what type checkers see of the class in actors/standins.py"
ONE_NAME = {
    "Actor": _FOR_TYPE_CHECKERS,
    "Endpoint": _FOR_TYPE_CHECKERS,
    "EndpointProperty": _FOR_TYPE_CHECKERS,
    "Client": "each supported release of Monarch has a module with this class, which the engine chooses by its version",
    "Response": "to an HTTP request, and to a call of an endpoint: no module knows both",
}
"""Names that two classes of a package may have, and why."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def mirrored_test(module: Path) -> Path:
    package = next(package for package in PACKAGES if module.is_relative_to(ROOT / package))
    relative = module.relative_to(ROOT / package)
    return ROOT / "tests" / PACKAGES[package] / relative.parent / f"test_{relative.stem.strip('_')}.py"


def has_logic(module: Path) -> bool:
    """Whether the module has a function that does more than return, raise, or define."""
    functions = [
        node
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return any(
        isinstance(node, ast.If | ast.For | ast.While | ast.Try | ast.With) for f in functions for node in ast.walk(f)
    )


def lists_only_its_own(module: Path) -> bool:
    """Whether the module has ``__all__``, and imports none of the names in it."""
    tree = ast.parse(module.read_text())
    lists = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and "__all__" in map(ast.unparse, node.targets)
    ]
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {alias.asname or alias.name for node in imports for alias in node.names}
    return bool(lists) and imported.isdisjoint(ast.literal_eval(lists[0]))


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_every_folder_says_what_it_is_and_what_it_never_does(folder: Path) -> None:
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    assert len(docstring.split()) >= 8
    assert SAYS_WHAT_IT_NEVER_DOES.search(docstring)


def test_the_top_level_has_few_folders() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    folders = {name.partition("/")[0] for name in listed.stdout.split("\0") if "/" in name}
    assert len(folders) <= MOST_FOLDERS, (
        f"the top level has {len(folders)} folders: checks belong below tests/, a package below the nearest source "
        f"root: {', '.join(sorted(folders))}"
    )


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_no_folder_has_too_many_modules(folder: Path) -> None:
    modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= MOST_MODULES, (
        f"{name_of(folder)} has {len(modules)} modules: move a subject of its own to a folder, or merge small ones"
    )


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_only_public_pages_and_modules_that_export_again_have_all(folder: Path) -> None:
    needless = [
        path.name
        for path in folder.glob("*.py")
        if path.name != "__init__.py" and name_of(path) not in LIST_THEIR_NAMES and lists_only_its_own(path)
    ]
    assert not needless, f"{name_of(folder)}: mypy needs no __all__ in {needless}: delete it"


def doubles_in(package: str) -> dict[str, list[str]]:
    """The public names that several classes of the package have, with their modules."""
    modules: dict[str, list[str]] = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules.setdefault(node.name, []).append(name_of(path))
    return {name: found for name, found in modules.items() if len(found) > 1}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_two_classes_of_a_package_have_one_name(package: str) -> None:
    doubles = {name: modules for name, modules in doubles_in(package).items() if name not in ONE_NAME}
    assert not doubles, f"rename all but one of each: a name that is searched for must lead to one class: {doubles}"


def test_names_that_two_classes_may_have_are_needed() -> None:
    assert ONE_NAME.keys() <= {name for package in PACKAGES for name in doubles_in(package)}


def modules_to_test(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*.py")) if path.name not in ENTRY_POINTS and has_logic(path)]


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_every_module_with_logic_has_a_test_module(folder: Path) -> None:
    for module in modules_to_test(folder):
        test = ROOT / TESTED_ELSEWHERE.get(name_of(module), name_of(mirrored_test(module)))
        assert test.exists(), f"{name_of(module)} has no tests: write {name_of(test)}"


@pytest.mark.parametrize("module", TESTED_ELSEWHERE)
def test_exceptions_are_needed(module: str) -> None:
    assert (ROOT / module).exists()
    assert not mirrored_test(ROOT / module).exists()


def polls(node: ast.AST, *, inner: bool) -> bool:
    """Whether the node may run again and again: a loop, or a condition that ``wait_for`` gets."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return isinstance(node, (ast.While, ast.For, ast.Lambda)) or (inner and isinstance(node, functions))


def test_no_test_reads_a_capture_again_and_again() -> None:
    polled = set()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if ".readouterr()" not in (text := path.read_text()):
            continue
        tests = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        loops = [node for test in tests for node in ast.walk(test) if polls(node, inner=node is not test)]
        reads = [node for loop in loops for node in ast.walk(loop) if isinstance(node, ast.Attribute)]
        polled |= {f"{name_of(path)}:{node.lineno}" for node in reads if node.attr == "readouterr"}
    assert not polled, f"what threads print meanwhile may be lost: take the fixture 'printed' at {sorted(polled)}"
