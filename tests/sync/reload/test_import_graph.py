"""What a file imports is read from its text, whatever the form."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest

from meshgate_sync.reload.import_graph import affected, assigned, imports_in


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import a", ["import a"]),
        ("import a.b as c, d  # why", ["import a.b as c, d"]),
        ("from a import b", ["from a import b"]),
        ("from . import a, b", ["from . import a, b"]),
        ("from ..a.b import *", ["from ..a.b import *"]),
        ("from a import (\n    b,  # (one)\n    c as d,\n)\nx = 1", ["from a import b, c as d"]),
        ("from a \\\n    import b, \\\n    c", ["from a import b, c"]),
        ("def f():\n\timport a\n\tfrom b import c", ["import a", "from b import c"]),
        ("try: import a\nexcept ImportError: a = None", ["import a"]),
        ("if x: import a; import b", ["import a", "import b"]),
        ("x = 1; from a import b", ["from a import b"]),
        ("important = 1\nfrom_here = 2", []),
        ("# import a", []),
        ('def f():\n    """Takes what you\n    import from the shop."""', []),
    ],
)
def test_imports_are_found_in_every_form(text: str, found: list[str]) -> None:
    assert [ast.unparse(node) for node in imports_in(text)] == found


@pytest.mark.parametrize("opened", ["import (", "from a import (", "    from a \\\n import ("])
def test_comments_after_what_looks_like_an_import_take_no_time(opened: str) -> None:
    """A pattern took twice as long for each of these lines."""
    text = f'"""Use\n{opened}\nlike so."""\n' + "# why\n" * 500 + "import b\n"
    assert [ast.unparse(node) for node in imports_in(text)] == ["import b"]


@pytest.mark.parametrize("text", ["import a\ndef", "import a\nx = " + "-" * 100_000 + "1"])
def test_a_file_that_cannot_be_parsed_imports_nothing(text: str) -> None:
    assert imports_in(text) == ()


def test_the_imports_of_this_packages_own_files_are_those_that_a_parser_finds() -> None:
    for module in (ast, pytest):
        with open(str(module.__file__), encoding="utf-8") as file:
            text = file.read()
        parsed = {
            ast.unparse(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)
        }
        assert parsed == {ast.unparse(node) for node in imports_in(text)}


def test_what_a_file_assigns_is_what_it_binds_at_its_top(tmp_path: object) -> None:
    path = f"{tmp_path}/a.py"
    with open(path, "w", encoding="utf-8") as file:
        file.write("import a.b\nfrom c import d as e\nf = g = 1\nclass H: i = 1\ndef j(k): l = 1\nprint(m)\n")
    assert assigned(path) == {"a", "e", "f", "g", "H", "j"}


def test_a_file_that_begins_with_a_byte_order_mark_has_imports(tmp_path: Path) -> None:
    """As those that some editors save on Windows."""
    modules = {}
    for name, text in (("conf", "RATE = 1\n"), ("train", "\ufefffrom conf import RATE\n")):
        modules[name] = ModuleType(name)
        modules[name].__file__ = str(tmp_path / f"{name}.py")
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    assert affected(modules, ["conf"]) == ["conf", "train"]
