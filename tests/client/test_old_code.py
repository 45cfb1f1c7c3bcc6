"""What this program runs itself and was saved since is told to whoever uses it."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from meshgate import old_code
from meshgate.pickling import dump_class

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


def test_a_class_from_before_its_module_was_reloaded_here_is_taken_for_the_one_it_has_become(
    module: ModuleType,
) -> None:
    before = module.Model
    importlib.reload(module)
    assert before is not module.Model
    assert old_code.renewed(before) is module.Model
    assert dump_class(before, by_value=False) == dump_class(module.Model, by_value=False)


def test_another_class_under_its_name_is_not_what_a_class_has_become(module: ModuleType) -> None:
    before = module.Model
    module.Model = dict  # type: ignore[attr-defined]
    assert old_code.renewed(before) is before


def test_what_a_file_has_by_now_is_read_from_it(module: ModuleType) -> None:
    assert not old_code.has_now(module.Model, "other")
    save(module, SOURCE + "    @endpoint\n    def other(self): pass\n")
    assert old_code.has_now(module.Model, "other")
    save(module, "class (")
    assert not old_code.has_now(module.Model, "other")


def test_who_saved_a_file_is_advised_to_import_it_again(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(old_code, "_BEGUN", time.time() + 2)
    assert old_code.advice(module.Model) == ""
    save(module, SOURCE)
    assert "model_saved_since.py was saved after this program began: importlib.reload(" in old_code.advice(module.Model)


def test_a_class_of_a_script_that_was_saved_since_is_known_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("as it was")
    monkeypatch.setattr(old_code, "_SCRIPT", str(script))
    monkeypatch.setattr(old_code, "_TEXT", "as it was")
    mine = type("Mine", (), {"__module__": "__main__"})
    assert old_code.of_script(mine) is None
    script.write_text("as it is")
    assert old_code.of_script(mine) == str(script)
    assert old_code.of_script(type("Other", (), {"__module__": "other"})) is None
    assert old_code.text_of(str(script)) == "as it was"
