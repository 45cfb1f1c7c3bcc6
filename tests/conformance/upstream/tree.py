"""The tests of a Monarch source tree, of an unpacked or packed wheel, or of an installed torchmonarch: which there are,
and copies to run. Reads their source and imports nothing of it.
"""

from __future__ import annotations

import ast
import re
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DRIVER = Path(__file__).parent / "driver"  # what takes the place of Monarch's helpers for tests
_IMPORT = re.compile(
    r"^(?P<indent>[ \t]*)(?P<how>from|import)[ ]+monarch(?P<rest>(?:\.\w+)*)(?P<after>[ ,;\n][^\n]*|)$", re.MULTILINE
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Test:
    """A test function; one that pytest runs with several parameters is one test."""

    file: str
    name: str  # with its class, as in "TestMesh::test_slice"
    node: ast.FunctionDef | ast.AsyncFunctionDef
    owner: ast.ClassDef | None = None

    __test__ = False  # this is no test class of pytest's

    @property
    def id(self) -> str:
        return f"{self.file}::{self.name}"


@dataclass(frozen=True)
class Tree:
    """``tests`` is the directory of Monarch's Python tests, ``release`` that of the sources, or "" if not named."""

    tests: Path
    release: str

    def files(self) -> list[Path]:
        """The files that pytest collects, and those of which the names say so but which hold no test."""
        return sorted({*self.tests.rglob("test_*.py"), *self.tests.rglob("*_test.py")})

    def name_of(self, file: Path) -> str:
        return file.relative_to(self.tests).as_posix()


def open_tree(source: Path, unpacked: Path) -> Tree:
    """``source``: a source tree, a wheel, an unpacked wheel, or the site-packages of a torchmonarch. A wheel is
    unpacked into ``unpacked``. Raises ValueError if there are no tests.
    """
    if source.suffix == ".whl":
        with zipfile.ZipFile(source) as wheel:
            members = [each for each in wheel.namelist() if each.startswith(("tests/", "torchmonarch-"))]
            wheel.extractall(unpacked, members)
        source = unpacked
    for tests in (source / "python" / "tests", source / "tests"):
        if any(tests.glob("test_*.py")):
            return Tree(tests, _release(source))
    raise ValueError(f"{source} has no Monarch tests: neither python/tests, as a source tree, nor tests, as a wheel")


def _release(source: Path) -> str:
    for metadata in source.glob("torchmonarch-*.dist-info/METADATA"):
        found = re.search(r"^Version: (\S+)", metadata.read_text(), re.MULTILINE)
        return found.group(1) if found else ""
    project = source / "pyproject.toml"
    found = re.search(r'^version = "([^"]+)"', project.read_text(), re.MULTILINE) if project.exists() else None
    return found.group(1) if found else ""


def find_tests(module: ast.Module, file: str) -> Iterator[Test]:
    """The tests that pytest would collect, those that a class inherits from another of this module included."""
    classes = {each.name: each for each in module.body if isinstance(each, ast.ClassDef)}
    for each in module.body:
        if isinstance(each, _FUNCTIONS) and each.name.startswith("test"):
            yield Test(file, each.name, each)
        elif isinstance(each, ast.ClassDef) and _is_collected(each, classes):
            methods: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}
            for owner in reversed(lineage(each, classes)):
                methods.update((item.name, item) for item in owner.body if isinstance(item, _FUNCTIONS))
            for name, node in methods.items():
                if name.startswith("test"):
                    yield Test(file, f"{each.name}::{name}", node, each)


def lineage(owner: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """A class and its bases, as far as they are of ``classes``, nearest first."""
    found = [owner]
    for base in owner.bases:
        if isinstance(base, ast.Name) and base.id in classes and classes[base.id] is not owner:
            found += lineage(classes[base.id], classes)
    return found


def _is_collected(owner: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> bool:
    names = {ast.unparse(base).rsplit(".", 1)[-1] for each in lineage(owner, classes) for base in each.bases}
    return owner.name.startswith("Test") or bool(names & {"TestCase", "IsolatedAsyncioTestCase"})


def copy_tests(tree: Tree, target: Path, through_gateway: bool) -> Path:
    """Copies the tests to ``target`` and returns the directory of the copy.

    ``through_gateway``: what they import from Monarch then comes from meshgate, also in the programs that they start,
    and in those whose source they hold in strings.
    """
    shutil.rmtree(target, ignore_errors=True)
    copy = target / "tests"
    shutil.copytree(tree.tests, copy, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    shutil.copy(DRIVER / "conftest.py", copy / "conftest.py")
    if not through_gateway:
        return copy
    for file in copy.rglob("*.py"):
        text = file.read_text()
        if (rewritten := import_from_meshgate(text)) != text:
            file.write_text(rewritten)
    for helper in ("scoped_state.py", "proc_mesh_test_utils.py"):
        shutil.copy(DRIVER / "gateway" / helper, copy / helper)
    shutil.copy(DRIVER / "gateway" / "through_gateway.py", target / "through_gateway.py")
    return copy


def import_from_meshgate(source: str) -> str:
    """``source`` with each import from Monarch replaced by one from the module ``through_gateway``."""

    def replaced(found: re.Match[str]) -> str:
        indent, how, rest, after = (found[each] for each in ("indent", "how", "rest", "after"))
        if how == "from":
            return f"{indent}from through_gateway.monarch{rest}{after}"
        if after.strip().startswith("as "):
            return f"{indent}import through_gateway.monarch{rest}{after}"
        return f"{indent}import through_gateway.monarch{rest}; from through_gateway import monarch{after}"

    return _IMPORT.sub(replaced, source)
