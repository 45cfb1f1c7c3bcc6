"""Source files that were saved after this program loaded them are detected."""

from __future__ import annotations

import ast
import importlib
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from meshgate.serialization import stale_source
from meshgate.serialization.pickling import dump_class

SOURCE = "from meshgate import Actor, endpoint\nclass Model(Actor):\n    @endpoint\n    def step(self): return 1\n"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "model_saved_since.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield importlib.import_module("model_saved_since")
    del sys.modules["model_saved_since"]


def save(module: ModuleType, text: str) -> None:
    path = Path(str(module.__file__))
    path.write_text(text)
    os.utime(path, (time.time() + 5, time.time() + 5))


def test_a_class_is_replaced_by_the_one_of_its_reloaded_module(
    module: ModuleType,
) -> None:
    before = module.Model
    importlib.reload(module)
    assert before is not module.Model
    assert stale_source.current_class(before) is module.Model
    assert dump_class(before, by_value=False) == dump_class(module.Model, by_value=False)


def test_a_class_is_not_replaced_by_another_class_of_that_name(module: ModuleType) -> None:
    before = module.Model
    module.Model = dict  # type: ignore[attr-defined]
    assert stale_source.current_class(before) is before


def test_the_saved_source_is_searched_for_a_definition(module: ModuleType) -> None:
    assert not stale_source.source_defines(module.Model, "other")
    save(module, SOURCE + "    @endpoint\n    def other(self): pass\n")
    assert stale_source.source_defines(module.Model, "other")
    save(module, "class (")
    assert not stale_source.source_defines(module.Model, "other")


def test_the_hint_for_a_saved_file_suggests_a_reload(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stale_source, "_START_TIME", time.time() + 2)
    assert stale_source.restart_hint(module.Model) == ""
    save(module, SOURCE)
    hint = stale_source.restart_hint(module.Model)
    assert "model_saved_since.py was saved after this program started: call importlib.reload(" in hint


def test_a_class_of_a_saved_script_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("at the start")
    monkeypatch.setattr(stale_source, "_SCRIPT", str(script))
    monkeypatch.setattr(stale_source, "_SCRIPT_TEXT", "at the start")
    local = type("Local", (), {"__module__": "__main__"})
    assert stale_source.changed_script(local) is None
    script.write_text("saved")
    assert stale_source.changed_script(local) == str(script)
    assert stale_source.changed_script(type("Other", (), {"__module__": "other"})) is None
    assert stale_source.source_text(str(script)) == "at the start"


def test_threads_parse_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    parsing, most = 0, 0
    parse = ast.parse

    def count(*arguments: Any, **options: Any) -> ast.AST:
        nonlocal parsing, most
        parsing += 1
        most = max(most, parsing)
        time.sleep(0.001)  # lets another thread in, if it can come
        parsed = parse(*arguments, **options)
        parsing -= 1
        return parsed

    monkeypatch.setattr(ast, "parse", count)
    with ThreadPoolExecutor(8) as threads:
        assert len(list(threads.map(stale_source.parse_source, [SOURCE] * 40))) == 40
    assert most == 1
