from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from meshgate_sync.reload import Reloaded, plan_reload, reload_order

_names = itertools.count()


class Actor:
    """Stands for the base of actor classes."""


class Project:
    """Two snapshots of a small project, and this process running from the first."""

    def __init__(self, tmp_path: Path) -> None:
        self.prefix = f"reloaded{next(_names)}_"
        self.before, self.after = tmp_path / "before", tmp_path / "after"

    def write(self, version: Path, **files: str) -> None:
        for name, text in files.items():
            path = version / (self.prefix + name.replace("__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace("@", self.prefix))

    def load(self, name: str) -> ModuleType:
        return importlib.import_module(self.prefix + name)

    def names(self, modules: tuple[str, ...]) -> list[str]:
        return [name.removeprefix(self.prefix) for name in modules]

    def carry_out(self) -> Reloaded:
        plan = plan_reload([str(self.before)], str(self.after))
        sys.path[:] = [str(self.after), *(place for place in sys.path if place != str(self.before))]
        return plan.carry_out(Actor)

    def reload(self) -> list[str]:
        return self.names(self.carry_out().modules)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    project = Project(tmp_path)
    project.before.mkdir()
    project.after.mkdir()
    monkeypatch.setattr(sys, "path", [str(project.before), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield project
    for name in [name for name in sys.modules if name.startswith(project.prefix)]:
        del sys.modules[name]


def test_what_changed_is_reloaded_and_what_uses_it_after_it(project: Project) -> None:
    project.write(project.before, a="X = 1", b="from @a import X\nY = X", c="import @b\nZ = @b.Y", d="W = 0")
    project.write(project.after, a="X = 2", b="from @a import X\nY = X", c="import @b\nZ = @b.Y", d="W = 0")
    c, d = project.load("c"), project.load("d")
    assert project.reload() == ["a", "b", "c"]
    assert (c.Z, d.W) == (2, 0)


def test_what_did_not_change_is_left_alone(project: Project) -> None:
    project.write(project.before, a="import itertools\nT = object()")
    project.write(project.after, a="import itertools\nT = object()")
    token = project.load("a").T
    assert project.reload() == []
    assert project.load("a").T is token


def test_modules_that_use_each_other_are_reloaded_once_each(project: Project) -> None:
    cycle = {"a": "import @b\nX = {}", "b": "import @a\nY = 1"}
    project.write(project.before, a=cycle["a"].format(1), b=cycle["b"])
    project.write(project.after, a=cycle["a"].format(2), b=cycle["b"])
    assert project.load("a").X == 1
    assert sorted(project.reload()) == ["a", "b"]
    assert project.load("a").X == 2


def test_parts_of_packages_come_from_the_new_version(project: Project) -> None:
    for version, number in ((project.before, 1), (project.after, 2)):
        project.write(version, p____init__="", p__inner=f"from .other import V\nX = {number}", p__other="V = 0")
    inner = importlib.import_module(f"{project.prefix}p.inner")
    assert project.reload() == ["p.inner"]
    assert inner.X == 2
    assert str(project.after) in str(inner.__file__)


def test_a_syntax_error_leaves_everything_as_it_was(project: Project) -> None:
    project.write(project.before, a="X = 1", b="Y = 1")
    project.write(project.after, a="X = 2", b="Y = (")
    a = project.load("a")
    project.load("b")
    with pytest.raises(SyntaxError):
        project.reload()
    assert a.X == 1


def test_a_reload_in_which_a_module_raised_is_done_again_from_the_start(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write(project.before, a="X = 1", b="import @a, os\nY = @a.X", c="import @b\nZ = @b.Y")
    project.write(project.after, a="X = 2", b="import @a, os\nos.environ['MENDED']\nY = @a.X", c="import @b\nZ = @b.Y")
    c = project.load("c")
    monkeypatch.delenv("MENDED", raising=False)
    for _ in range(2):
        with pytest.raises(KeyError):
            project.reload()
        assert c.Z == 1
    monkeypatch.setenv("MENDED", "yes")
    assert project.reload() == ["a", "b", "c"]
    assert c.Z == 2
    assert project.reload() == []


def test_a_module_whose_file_is_gone_is_told_and_kept(project: Project) -> None:
    project.write(project.before, a="X = 1")
    module = project.load("a")
    done = project.carry_out()
    assert project.names(done.vanished) == ["a"]
    assert module.X == 1


def test_live_objects_of_a_reloaded_class_are_told(project: Project) -> None:
    source = "from tests.sync.test_reload import Actor\nclass Trainer(Actor):\n    version = {}\n"
    project.write(project.before, a=source.format(1))
    project.write(project.after, a=source.format(2))
    alive = project.load("a").Trainer()
    plan = plan_reload([str(project.before)], str(project.after))
    sys.path.insert(0, str(project.after))
    done = plan.carry_out(type(alive).__mro__[1])
    assert done.old_classes == (f"{project.prefix}a.Trainer",)
    assert (alive.version, project.load("a").Trainer.version) == (1, 2)


def test_the_order_is_the_same_whatever_the_order_of_the_question(project: Project) -> None:
    project.write(project.before, a="X = 1", b="import @a", c="import @a, @b")
    modules = {project.prefix + name: project.load(name) for name in "abc"}
    changed = [project.prefix + name for name in "ba"]
    assert reload_order(modules, changed) == reload_order(modules, reversed(changed))
