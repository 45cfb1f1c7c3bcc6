from __future__ import annotations

import ast
import zipfile
from pathlib import Path

import pytest

from tests.conformance.upstream.tree import copy_tests, find_tests, import_from_meshgate, open_tree

SOURCE = """
import unittest
from monarch.actor import this_host

def test_plain(): ...
async def test_of_asyncio(): ...
def helper(): ...

class TestMesh:
    def test_slice(self): ...

class Base(unittest.TestCase):
    def test_inherited(self): ...

class ThreadTest(Base):
    def test_own(self): ...

class Actor:
    def test_method(self): ...
"""


def names(source: str) -> list[str]:
    return [each.name for each in find_tests(ast.parse(source), "test_a.py")]


def test_the_tests_are_those_that_pytest_collects() -> None:
    assert names(SOURCE) == [
        "test_plain",
        "test_of_asyncio",
        "TestMesh::test_slice",
        "Base::test_inherited",
        "ThreadTest::test_inherited",
        "ThreadTest::test_own",
    ]


@pytest.mark.parametrize("place", ["python/tests", "tests"])
def test_a_source_tree_and_a_wheel_hold_tests(tmp_path: Path, place: str) -> None:
    tests = tmp_path / place
    tests.mkdir(parents=True)
    (tests / "test_a.py").write_text(SOURCE)
    (tests / "sub").mkdir()
    (tests / "sub" / "test_b.py").write_text(SOURCE)
    tree = open_tree(tmp_path, tmp_path / "unpacked")
    assert [tree.name_of(file) for file in tree.files()] == ["sub/test_b.py", "test_a.py"]
    assert tree.release == ""


def test_a_packed_wheel_names_its_release(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "torchmonarch-0.7.0-cp311.whl", "w") as wheel:
        wheel.writestr("tests/test_a.py", SOURCE)
        wheel.writestr("torchmonarch-0.7.0.dist-info/METADATA", "Metadata-Version: 2.4\nVersion: 0.7.0\n")
        wheel.writestr("monarch/__init__.py", "")
    tree = open_tree(tmp_path / "torchmonarch-0.7.0-cp311.whl", tmp_path / "unpacked")
    assert (tree.release, [file.name for file in tree.files()]) == ("0.7.0", ["test_a.py"])
    assert not (tmp_path / "unpacked" / "monarch").exists()


def test_a_directory_without_tests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no Monarch tests"):
        open_tree(tmp_path, tmp_path / "unpacked")


@pytest.mark.parametrize(
    ("line", "rewritten"),
    [
        ("from monarch.actor import (", "from through_gateway.monarch.actor import ("),
        ("    from monarch import job", "    from through_gateway.monarch import job"),
        ("import monarch.actor", "import through_gateway.monarch.actor; from through_gateway import monarch"),
        ("import monarch._src.job as js", "import through_gateway.monarch._src.job as js"),
        ("import monarch", "import through_gateway.monarch; from through_gateway import monarch"),
        ("from monarch_supervisor import worker", "from monarch_supervisor import worker"),
        ("import monarchy", "import monarchy"),
        ("from tests.monarch import a", "from tests.monarch import a"),
    ],
)
def test_imports_from_monarch_come_from_meshgate(line: str, rewritten: str) -> None:
    assert import_from_meshgate(f"import os\n{line}\nx = 1\n") == f"import os\n{rewritten}\nx = 1\n"


def test_only_the_copy_for_the_gateway_is_rewritten(tmp_path: Path) -> None:
    tests = tmp_path / "source" / "tests"
    tests.mkdir(parents=True)
    (tests / "test_a.py").write_text(SOURCE)
    (tests / "conftest.py").write_text("raise RuntimeError")
    tree = open_tree(tmp_path / "source", tmp_path)
    direct = copy_tests(tree, tmp_path / "direct", through_gateway=False)
    gateway = copy_tests(tree, tmp_path / "gateway", through_gateway=True)
    assert (direct / "test_a.py").read_text() == SOURCE == (tests / "test_a.py").read_text()
    assert (gateway / "test_a.py").read_text() == SOURCE.replace("from monarch.", "from through_gateway.monarch.")
    assert (gateway.parent / "through_gateway.py").exists()
    assert "RuntimeError" not in (direct / "conftest.py").read_text()
