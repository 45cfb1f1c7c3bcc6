from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import inspect
import itertools
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

from meshgate_sync.errors import CannotReload
from meshgate_sync.reload import EXTENSIONS, Reloaded, affected, assigned, imports_in, old_classes, plan_reload

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
            path = version / (self.prefix + name.replace("__", "/").replace("//init//", "/__init__") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace("@", self.prefix))

    def load(self, name: str) -> ModuleType:
        return importlib.import_module(self.prefix + name)

    def names(self, modules: tuple[str, ...]) -> list[str]:
        return [name.removeprefix(self.prefix) for name in modules]

    def execute(self, *, versioned: bool = True) -> Reloaded:
        """``versioned``: the process is known to run from the first snapshot."""
        plan = plan_reload([str(self.before)] if versioned else [], str(self.after), ("", "lib"))
        earlier = list(sys.path)
        sys.path[:] = [str(self.after), *(place for place in sys.path if place != str(self.before))]
        try:
            return plan.execute(Actor)
        except BaseException:
            sys.path[:] = earlier
            raise

    def reload(self) -> list[str]:
        return self.names(self.execute().modules)


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


def test_parts_of_a_package_have_what_the_package_has_now(project: Project) -> None:
    for version, number in ((project.before, 1), (project.after, 2)):
        project.write(
            version, p____init____=f"C = {number}\nfrom .inner import X", p__inner="from . import C\nX = C * 10"
        )
    package = project.load("p")
    assert project.reload() == ["p.inner", "p"]
    assert (package.C, package.X, package.inner.X) == (2, 20, 20)


def test_modules_that_take_from_each_other_are_executed_as_in_a_new_process(project: Project) -> None:
    for version, number in ((project.before, 1), (project.after, 2)):
        project.write(version, b=f"A = {number}\nimport @a\nB = @a.B", a="from @b import A\nB = A * 10")
    b = project.load("b")
    assert project.reload() == ["a", "b"]
    assert (b.A, b.B) == (2, 20)


@pytest.mark.parametrize(("before", "after"), [("a", "a____init____"), ("a____init____", "a")])
def test_a_module_that_becomes_a_package_or_ceases_to_be_one_is_reloaded(
    project: Project, before: str, after: str
) -> None:
    project.write(project.before, **{before: "X = 1"}, b="from @a import X")
    project.write(project.after, **{after: "X = 2"}, b="from @a import X")
    b = project.load("b")
    done = project.execute()
    assert (project.names(done.modules), done.vanished) == (["a", "b"], ())
    assert b.X == 2
    assert hasattr(project.load("a"), "__path__") is after.endswith("____")


@pytest.mark.parametrize(("before", "after"), [("a", "a____init____"), ("a____init____", "a")])
def test_a_process_without_a_version_may_have_loaded_files_that_are_gone(
    project: Project, before: str, after: str
) -> None:
    project.write(project.before, **{before: "X = 1"}, b="from @a import X")
    project.write(project.after, **{after: "X = 2"}, b="from @a import X")
    b = project.load("b")
    shutil.rmtree(project.before)
    project.before.mkdir()
    if before != "a":
        (project.before / f"{project.prefix}a").touch()  # the package's directory has become a file
    done = project.execute(versioned=False)
    assert (project.names(done.modules), done.vanished) == (["a", "b"], ())
    assert b.X == 2


@pytest.mark.parametrize(("before", "after"), [("a", "a____init____"), ("a____init____", "a")])
def test_a_module_that_becomes_a_package_with_the_same_content_is_reloaded(
    project: Project, before: str, after: str
) -> None:
    project.write(project.before, **{before: "X = 1"})
    project.write(project.after, **{after: "X = 1"})
    a = project.load("a")
    assert project.reload() == ["a"]
    assert hasattr(a, "__path__") is after.endswith("____")


def look(names: list[str]) -> dict[str, list[object]]:
    """What a process sees of these modules."""
    found = {}
    for name in names:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        package, _, last = name.rpartition(".")
        part = not package or getattr(sys.modules[package], last) is module
        own = [[each, value] for each, value in vars(module).items() if each.isupper()]
        found[name] = [getattr(module, "__file__", None), [*getattr(module, "__path__", ())], part, own]
    return found


def look_in_new_process(path: Path, names: list[str]) -> dict[str, list[object]]:
    program = f"import importlib, json, sys\n{inspect.getsource(look)}\nprint(json.dumps(look({names})))"
    done = subprocess.run([sys.executable, "-S", "-c", program], cwd=path, stdout=subprocess.PIPE, check=True)
    seen: dict[str, list[object]] = json.loads(done.stdout)
    return seen


NAMESPACE_PACKAGES = {
    "regular": (["p__m"], ["p____init____", "p__m"]),
    "regular, within a package": (["p____init____", "p__q__m"], ["p____init____", "p__q____init____", "p__q__m"]),
    "regular, with another within": (["p__q__m"], ["p____init____", "p__q__m"]),
    "regular, as the one within": (["p__q__m"], ["p____init____", "p__q____init____", "p__q__m"]),
    "a module": (["p__m"], ["p"]),
    "a module beside its directory": (["p__q__m"], ["p", "p__q__m"]),
    "the same": (["p__q__m"], ["p__q__m"]),
    "gone": (["p__q__m"], []),
    "gone from its package": (["p____init____", "p__q__m"], ["p____init____"]),
}


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("change", NAMESPACE_PACKAGES)
def test_namespace_packages_become_what_they_are_in_new_processes(
    project: Project, change: str, reverse: bool, versioned: bool
) -> None:
    before, after = reversed(NAMESPACE_PACKAGES[change]) if reverse else NAMESPACE_PACKAGES[change]
    user = "try:\n    import @p as p\nexcept ImportError:\n    p = None\nX = getattr(p, 'X', 0)"
    project.write(project.before, **dict.fromkeys(before, "X = 1"), user=user)
    project.write(project.after, **dict.fromkeys(after, "X = 2"), user=user)
    names = [project.prefix + name for name in ("p", "p.m", "p.q", "p.q.m", "user")]
    look(names)
    if not versioned:
        shutil.rmtree(project.before)
    done = project.execute(versioned=versioned)
    seen = look(names)
    assert seen == look_in_new_process(project.after, names)
    assert not seen.keys() & set(done.vanished)


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("kept", [True, False])
def test_a_package_may_import_what_is_in_its_namespace_packages(project: Project, kept: bool, versioned: bool) -> None:
    project.write(project.before, p____init____="from .q import m", p__q__m="X = 1")
    project.write(project.after, p__q__m="X = 2")
    if kept:
        project.write(project.after, p____init____="from .q import m\nX = 2")
    project.load("p")
    if not versioned:
        (project.before / f"{project.prefix}p" / "__init__.py").unlink()
    project.execute(versioned=versioned)
    names = [project.prefix + name for name in ("p", "p.q", "p.q.m")]
    assert look(names) == look_in_new_process(project.after, names)


@pytest.mark.parametrize("kept", [True, False])
def test_a_namespace_package_stays_if_it_has_another_directory(project: Project, tmp_path: Path, kept: bool) -> None:
    project.write(project.before, p__mine="X = 1", user="import @p.theirs")
    project.write(tmp_path / "installed", p__theirs="X = 2")
    project.write(project.after, user="import @p.theirs\nfound = @p.theirs.X" if kept else "")
    sys.path.append(str(tmp_path / "installed"))
    user = project.load("user")
    project.load("p.mine")
    if not kept:
        shutil.rmtree(tmp_path / "installed")
    assert project.names(project.execute().vanished) == (["p.mine"] if kept else ["p", "p.mine"])
    assert not kept or user.found == 2


@pytest.mark.parametrize("kept", [True, False])
def test_a_namespace_package_of_two_directories_of_a_version_is_gone_with_both(project: Project, kept: bool) -> None:
    project.write(project.before, p__m="")
    project.write(project.before / "lib", p__n="")
    if kept:
        project.write(project.after / "lib", p__n="")
    sys.path.insert(1, str(project.before / "lib"))
    look([project.prefix + name for name in ("p.m", "p.n")])
    assert project.names(project.execute().vanished) == (["p.m"] if kept else ["p", "p.m", "p.n"])


def package_with_compiled_part(project: Project, directory: str = "") -> tuple[ModuleType, ModuleType]:
    """A package with an ``__init__.py`` in the first snapshot alone, and its compiled module, which is in both."""
    project.write(project.before / directory, p____init____="")
    package = project.load("p")
    for version in (project.before, project.after):
        file = version / directory / f"{project.prefix}p" / f"compiled{EXTENSIONS[0]}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"")
    compiled = sys.modules[f"{project.prefix}p.compiled"] = ModuleType(f"{project.prefix}p.compiled")
    compiled.__file__ = str(project.before / directory / f"{project.prefix}p" / f"compiled{EXTENSIONS[0]}")
    package.compiled = compiled
    return package, compiled


def test_a_package_that_becomes_a_namespace_package_keeps_its_compiled_parts(project: Project) -> None:
    package, compiled = package_with_compiled_part(project)
    assert project.execute() == Reloaded((), (), ())
    assert project.load("p").compiled is project.load("p.compiled") is compiled
    assert project.load("p") is not package


def test_a_package_to_which_no_import_path_leads_any_more_vanishes(project: Project) -> None:
    sys.path.insert(0, str(project.before / "lib"))
    package_with_compiled_part(project, "lib")
    sys.path.remove(str(project.before / "lib"))
    assert project.execute() == Reloaded((), (f"{project.prefix}p",), ())


def two_versions_beside_the_import_path(project: Project) -> None:
    """A package that loses its ``__init__.py``, and was imported from a directory of ``sys.path`` that is gone."""
    for version in (project.before, project.after):
        project.write(version / "lib", p__m=f"X = '{version.name}'", p__q____init____="", p__q__n="X = 1")
    project.write(project.before / "lib", p____init____="")
    sys.path.insert(0, str(project.before / "lib"))
    project.load("p.m")
    project.load("p.q.n")
    sys.path.remove(str(project.before / "lib"))


def test_modules_to_which_no_import_path_leads_any_more_vanish(project: Project) -> None:
    two_versions_beside_the_import_path(project)
    done = project.execute()
    assert (done.modules, sorted(project.names(done.vanished))) == ((), ["p", "p.m", "p.q", "p.q.n"])
    with pytest.raises(ModuleNotFoundError):
        project.load("p.m")


def test_a_module_to_which_no_import_path_leads_any_more_keeps_the_names_its_functions_use(project: Project) -> None:
    two_versions_beside_the_import_path(project)
    project.write(project.after / "lib", p__m="")
    module = project.load("p.m")
    assert "p.m" in project.names(project.execute().vanished)
    assert module.X == "before"


def test_a_changed_module_that_only_its_program_can_load_stops_the_reload(project: Project) -> None:
    for version in (project.before, project.after):
        project.write(version, one=f"X = '{version.name}'")
    name, file = f"{project.prefix}plugins.one", project.before / f"{project.prefix}one.py"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(ModuleNotFoundError, match="plugins"):
        project.reload()
    assert (sys.modules[name], module.X) == (module, "before")


def test_what_still_imports_a_module_to_which_no_import_path_leads_fails(project: Project) -> None:
    two_versions_beside_the_import_path(project)
    for version in (project.before, project.after):
        project.write(version, user="from @p.m import X")
    user, module = project.load("user"), project.load("p.m")
    with pytest.raises(ModuleNotFoundError):
        project.reload()
    assert (project.load("user"), project.load("p.m"), module.X) == (user, module, "before")


def test_a_module_stays_if_the_reload_adds_an_import_path_that_leads_to_it(project: Project) -> None:
    two_versions_beside_the_import_path(project)
    for version in (project.before, project.after):
        project.write(version, user=f"import sys\nsys.path.append('{version}/lib')\nfrom @p.m import X")
    user, module = project.load("user"), project.load("p.m")
    sys.path.remove(str(project.before / "lib"))
    done = project.execute()
    assert (project.names(done.modules), done.vanished) == (["p.m", "user", "p.q"], ())
    assert (user.X, project.load("p.m"), module.X) == ("after", module, "after")


class LazyPackage:
    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError("it is not ready")


@pytest.mark.parametrize("package", ["forgotten", "none", "lazy"])
def test_a_namespace_package_without_its_package_does_not_stop_a_reload(project: Project, package: str) -> None:
    for version in (project.before, project.after):
        project.write(version, p____init____="", p__q__m="", other=f"X = '{version.name}'")
    project.load("p.q.m")
    other = project.load("other")
    entry: Any = LazyPackage() if package == "lazy" else None
    sys.modules[f"{project.prefix}p"] = entry
    if package == "forgotten":
        del sys.modules[f"{project.prefix}p"]
    assert project.execute() == Reloaded((f"{project.prefix}other",), (), ())
    assert other.X == "after"
    assert f"{project.prefix}p.q.m" in sys.modules


def test_a_failed_reload_leaves_no_namespace_package_of_its_version(project: Project) -> None:
    project.write(project.before, user="")
    project.write(project.after, user="import @p.inner.part\nfail", p__inner__part="")
    project.load("user")
    with pytest.raises(NameError):
        project.reload()
    assert [name for name in sys.modules if name.startswith(f"{project.prefix}p")] == []
    project.write(project.after, user="from @p import X", p____init____="X = 1")
    assert project.reload() == ["user"]


def test_a_package_of_another_loader_may_be_gone(project: Project) -> None:
    project.write(project.before, user="X = 1", p__part="")
    project.write(project.after, user="X = 2")
    name = f"{project.prefix}p"
    spec = importlib.machinery.ModuleSpec(name, object(), is_package=True)  # type: ignore[arg-type]
    spec.submodule_search_locations = [str(project.before / name)]
    sys.modules[name] = package = ModuleType(name)
    package.__spec__, package.__path__ = spec, spec.submodule_search_locations
    project.load("p.part")
    project.load("user")
    assert project.reload() == ["user"]


def test_the_packages_of_a_module_need_not_be_importable(project: Project) -> None:
    for version in (project.before, project.after):
        project.write(version, x__plug__m=f"X = '{version.name}'")
    name = f"{project.prefix}gone.plug"  # as of a program that registers plug-ins by hand
    sys.modules[name] = package = ModuleType(name)
    package.__path__ = [str(project.before / f"{project.prefix}x" / "plug")]
    loaded = load_by_file(f"{name}.m", project.before / f"{project.prefix}x" / "plug" / "m.py")
    assert project.names(project.execute().modules) == ["gone.plug.m"]
    assert loaded.X == "after"


def test_a_module_that_is_not_a_package_may_have_parts(project: Project) -> None:
    for version in (project.before, project.after):
        project.write(version, a="", b="X = 1")
    project.load("a")
    part = load_by_file(f"{project.prefix}a.b", project.before / f"{project.prefix}b.py")
    assert project.execute() == Reloaded((), (), ())
    assert sys.modules[part.__name__] is part


@pytest.mark.parametrize("versioned", [True, False])
def test_a_new_package_precedes_a_module_of_its_name_that_did_not_change(project: Project, versioned: bool) -> None:
    project.write(project.before, a="X = 1", b="from @a import X")
    project.write(project.after, a="X = 1", a____init____="X = 2", b="from @a import X")
    b = project.load("b")
    assert project.names(project.execute(versioned=versioned).modules) == ["a", "b"]
    assert (b.X, project.load("a").__file__) == (2, str(project.after / f"{project.prefix}a" / "__init__.py"))


def test_what_lies_beside_a_module_that_did_not_change_is_the_new_one(project: Project) -> None:
    source = "import pathlib, pkgutil\ndef f(): return pathlib.Path(__file__).with_name('f.txt').read_text()"
    for version in (project.before, project.after):
        project.write(version, a=source)
        (version / "f.txt").write_text(version.name)
    a = project.load("a")
    assert a.f() == "before"
    assert project.reload() == []
    assert a.f() == "after"


def test_a_process_without_a_version_reloads_what_the_version_has(project: Project) -> None:
    for version in (project.before, project.after):  # saved before the first sync: the files are equal
        project.write(version, pkg____init____="", pkg__part="X = 2", user="from @pkg import part\nY = part.X")
    project.write(project.before, own="Z = 0")
    user, own = project.load("user"), project.load("own")
    sys.modules[f"{project.prefix}pkg.part"].X = 1  # type: ignore[attr-defined]
    done = project.execute(versioned=False)
    assert project.names(done.modules) == ["pkg", "pkg.part", "user"]
    assert (user.Y, own.Z, done.vanished) == (2, 0, ())
    assert user.__file__ == str(project.after / f"{project.prefix}user.py")


def test_a_process_without_a_version_finds_modules_in_all_directories_of_the_version(project: Project) -> None:
    project.write(project.before, lib="X = 1")
    project.load("lib")
    project.write(project.after / "lib", lib="X = 2")
    assert project.execute(versioned=False).modules == (f"{project.prefix}lib",)
    assert project.load("lib").X == 2


def test_a_process_without_a_version_keeps_installed_modules(project: Project) -> None:
    for name in ("ast", "pytest"):
        (project.after / f"{name}.py").write_text("raise AssertionError")
    assert plan_reload([], str(project.after)).to_reload == []


@pytest.mark.parametrize(("content", "refused"), [(b"old", False), (b"new", True)])
def test_a_process_without_a_version_keeps_compiled_modules(
    project: Project, content: bytes, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{project.prefix}compiled"
    module = ModuleType(name)
    module.__file__ = str(project.before / f"{name}{EXTENSIONS[0]}")
    (project.before / f"{name}{EXTENSIONS[0]}").write_bytes(b"old")
    (project.after / f"{name}{EXTENSIONS[0]}").write_bytes(content)
    monkeypatch.setitem(sys.modules, name, module)
    if refused:
        with pytest.raises(CannotReload, match=name):
            plan_reload([], str(project.after))
    else:
        assert plan_reload([], str(project.after)).to_reload == []


def test_a_compiled_module_that_changed_is_refused(project: Project, tmp_path: Path) -> None:
    project.write(project.before, a="X = 1")
    project.write(project.after, a="X = 2")
    a = project.load("a")
    compiled = ModuleType(f"{project.prefix}compiled")
    for version in (project.before, project.after):
        (version / "compiled.abi3.so").write_text(version.name)
    compiled.__file__ = str(project.before / "compiled.abi3.so")
    sys.modules[compiled.__name__] = compiled
    with pytest.raises(CannotReload, match=r"compiled and has changed.*Spawn new processes"):
        project.reload()
    assert a.X == 1


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("compiled", ["a.so", "a/__init__.abi3.so"])
def test_a_compiled_file_that_precedes_a_module_that_did_not_change_is_refused(
    project: Project, compiled: str, versioned: bool
) -> None:
    for version in (project.before, project.after):
        project.write(version, a="X = 1")
    project.load("a")
    file = project.after / (project.prefix + compiled)
    file.parent.mkdir(exist_ok=True)
    file.touch()
    with pytest.raises(CannotReload, match=rf"{project.prefix}a.*Spawn new processes"):
        project.execute(versioned=versioned)


def test_a_module_that_was_loaded_beside_a_compiled_file_is_reloaded_by_its_file(project: Project) -> None:
    for version, text in ((project.before, "X = 1"), (project.after, "X = 2")):
        project.write(version, a=text)
        (version / f"{project.prefix}a.so").touch()
    a = load_by_file(f"{project.prefix}a", project.before / f"{project.prefix}a.py")
    plan = plan_reload([str(project.before)], str(project.after))
    assert plan.new == {a.__name__: str(project.after / f"{project.prefix}a.py")}
    assert plan.to_reload == [a.__name__]


def load_by_file(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_module_that_was_loaded_by_its_file_is_reloaded_by_its_file(project: Project) -> None:
    for version, number in ((project.before, 1), (project.after, 2)):
        project.write(version, plugins__a=f"X = {number}")
    module = load_by_file(f"{project.prefix}elsewhere", project.before / f"{project.prefix}plugins" / "a.py")
    assert project.reload() == ["elsewhere"]
    assert module.X == 2


def test_a_module_is_not_found_in_the_old_version_through_what_a_package_made_its_path(project: Project) -> None:
    for version, number in ((project.before, 1), (project.after, 2)):
        project.write(
            version,
            p____init____="import pathlib\n__path__ = (str(pathlib.Path(__file__).parents[1] / '@extra'),)",
            extra__m=f"X = {number}",
        )
    module = project.load("p.m")
    assert project.reload() == ["p.m"]
    assert (module.X, module.__file__) == (2, str(project.after / f"{project.prefix}extra" / "m.py"))


@pytest.mark.parametrize(("name", "new"), [("a", False), ("elsewhere", False), ("elsewhere", True)])
def test_a_module_that_was_loaded_by_its_file_is_not_taken_for_a_package_beside_it(
    project: Project, name: str, new: bool
) -> None:
    for version in (project.before, project.after):
        project.write(version, a="X = 1")
        if not new or version == project.after:
            project.write(version, a____init____="X = 2")
    module = load_by_file(f"{project.prefix}{name}", project.before / f"{project.prefix}a.py")
    assert project.reload() == []
    assert (module.X, module.__file__) == (1, str(project.after / f"{project.prefix}a.py"))


def test_a_syntax_error_leaves_everything_as_it_was(project: Project) -> None:
    project.write(project.before, a="X = 1", b="Y = 1")
    project.write(project.after, a="X = 2", b="Y = (")
    a = project.load("a")
    project.load("b")
    with pytest.raises(SyntaxError):
        project.reload()
    assert a.X == 1


def test_a_reload_in_which_a_module_raised_leaves_everything_as_it_was(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write(project.before, a="X = 1\nGONE = 1", b="import @a, os\nY = @a.X", c="import @b\nZ = @b.Y")
    raises = "import @a, @new, os\nos.environ['MENDED']\nY = @a.X"
    project.write(project.after, a="X = 2\nNEW = 2", b=raises, c="import @b\nZ = @b.Y", new="")
    a, c = project.load("a"), project.load("c")
    names = set(vars(a))
    monkeypatch.delenv("MENDED", raising=False)
    for _ in range(2):
        with pytest.raises(KeyError):
            project.reload()
        assert (a.X, a.GONE, c.Z) == (1, 1, 1)
        assert set(vars(a)) == names
        assert str(project.before) in str(a.__file__)
        assert sys.modules[a.__name__] is a
        assert f"{project.prefix}new" not in sys.modules
    monkeypatch.setenv("MENDED", "yes")
    assert project.reload() == ["a", "b", "c"]
    assert c.Z == 2
    assert project.reload() == []


def test_what_a_failed_reload_imported_is_forgotten_even_in_a_store_behind_a_link(
    project: Project, tmp_path: Path
) -> None:
    project.after.rename(tmp_path / "elsewhere")
    project.after.symlink_to("elsewhere")
    project.write(project.before, a="X = 1")
    project.write(project.after, a="import @new\nraise ValueError", new="")
    project.load("a")
    with pytest.raises(ValueError):
        project.reload()
    assert f"{project.prefix}new" not in sys.modules


@pytest.mark.parametrize("versioned", [True, False])
def test_a_module_whose_file_is_gone_is_reported_and_can_no_longer_be_imported(
    project: Project, versioned: bool
) -> None:
    project.write(project.before, p____init____="", p__a="X = 1")
    module = importlib.import_module(f"{project.prefix}p.a")
    project.write(project.after, p____init____="")
    if not versioned:
        shutil.rmtree(project.before)
    done = project.execute(versioned=versioned)
    assert project.names(done.vanished) == ["p.a"]
    assert module.X == 1
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{project.prefix}p.a")
    assert not hasattr(project.load("p"), "a")


def test_a_process_without_a_version_keeps_modules_that_have_no_file(project: Project, tmp_path: Path) -> None:
    project.write(project.before, mine="")
    project.write(project.after, mine="", zipped="X = 2")
    project.write(tmp_path / "elsewhere", other="")
    with zipfile.ZipFile(tmp_path / "code.zip", "w") as archive:
        archive.writestr(f"{project.prefix}p/", "")
        for name in ("zipped", "beside", "p/part"):
            archive.writestr(f"{project.prefix}{name}.py", "X = 1")
    sys.path += [str(tmp_path / "elsewhere"), str(tmp_path / "code.zip")]
    generated = ModuleType(f"{project.prefix}generated")
    generated.__file__ = str(project.before / f"{generated.__name__}.py")
    sys.modules[generated.__name__] = generated
    kept = [project.load(name) for name in ("generated", "other", "beside", "p.part")]
    project.load("mine")
    project.load("zipped")
    shutil.rmtree(tmp_path / "elsewhere")  # as a module that was written for one import
    done = project.execute(versioned=False)
    assert (project.names(done.modules), done.vanished) == (["mine", "zipped"], ())
    assert [sys.modules[module.__name__] for module in kept] == kept


def test_what_still_imports_a_module_whose_file_is_gone_fails_as_it_would_in_a_new_process(project: Project) -> None:
    project.write(project.before, a="X = 1", b="from @a import X")
    project.write(project.after, b="from @a import X")
    b = project.load("b")
    with pytest.raises(ModuleNotFoundError):
        project.reload()
    assert project.load("b") is b
    assert project.load("a").X == 1


HELPED = """
from tests.sync.test_reload import Actor

def {0}(): return "{0}"

class Trainer(Actor):
    def step(self): return {0}()
"""


def test_a_name_that_is_gone_from_a_file_is_gone_from_its_module(project: Project) -> None:
    project.write(project.before, a=HELPED.format("old"))
    project.write(project.after, a=HELPED.format("new"))
    a = project.load("a")
    assert project.reload() == ["a"]
    assert (hasattr(a, "old"), a.Trainer().step()) == (False, "new")


def test_the_code_of_live_objects_keeps_the_names_that_are_gone(project: Project) -> None:
    project.write(project.before, a=HELPED.format("old"))
    project.write(project.after, a=HELPED.format("new"))
    a = project.load("a")
    alive = a.Trainer()
    assert project.execute().old_classes == (f"{project.prefix}a.Trainer",)
    assert (alive.step(), a.Trainer().step()) == ("old", "new")


def test_new_code_that_imports_a_name_which_is_gone_fails_as_it_would_in_a_new_process(project: Project) -> None:
    project.write(project.before, a="def old(): pass", b="from @a import old")
    project.write(project.after, a="def new(): pass", b="from @a import old")
    b = project.load("b")
    with pytest.raises(ImportError, match="old"):
        project.reload()
    assert b.old() is None


def test_live_objects_of_a_reloaded_class_are_reported(project: Project) -> None:
    source = "from tests.sync.test_reload import Actor\nclass Trainer(Actor):\n    version = {}\n"
    project.write(project.before, a=source.format(1))
    project.write(project.after, a=source.format(2))
    alive = project.load("a").Trainer()
    plan = plan_reload([str(project.before)], str(project.after))
    sys.path.insert(0, str(project.after))
    done = plan.execute(type(alive).__mro__[1])
    assert done.old_classes == (f"{project.prefix}a.Trainer",)
    assert (alive.version, project.load("a").Trainer.version) == (1, 2)


def test_live_objects_of_a_class_pickled_by_value_are_reported_if_it_uses_what_was_reloaded(
    project: Project,
) -> None:
    project.write(project.before, a="def f(): return 1")
    project.write(project.after, a="def f(): return 2")
    f = project.load("a").f
    names = {"Actor": Actor, "f": f, "__name__": "__main__"}
    exec("class Cell(Actor):\n    def go(self): return f()", names)
    alive = names["Cell"]()  # type: ignore[operator]
    assert project.execute().old_classes == ("__main__.Cell",)
    assert alive.go() == 1


def test_the_order_is_the_same_whatever_the_order_of_the_question(project: Project) -> None:
    project.write(project.before, a="X = 1", b="import @a", c="import @a, @b")
    modules = {project.prefix + name: project.load(name) for name in "abc"}
    changed = [project.prefix + name for name in "ba"]
    assert affected(modules, changed) == affected(modules, reversed(changed))


PLUGINS = {
    "import_module": "import importlib\nPLUGIN = importlib.import_module('@' + 'plugin').X",
    "__import__": "PLUGIN = __import__('@' + 'plugin').X",
    "a loop": (
        "import importlib, pkgutil, pathlib\nhere = str(pathlib.Path(__file__).parent)\nPLUGIN = max(\n"
        "    importlib.import_module(found.name).X for found in pkgutil.iter_modules([here])\n"
        "    if found.name.startswith('@plug'))"
    ),
}


@pytest.mark.parametrize("how", PLUGINS)
def test_a_module_that_imports_by_computed_names_is_reloaded(project: Project, how: str) -> None:
    project.write(project.before, plugin="X = 1", registry=PLUGINS[how], other="Y = object()")
    project.write(project.after, plugin="X = 2", registry=PLUGINS[how], other="Y = object()")
    registry, other = project.load("registry"), project.load("other")
    token = other.Y
    assert sorted(project.reload()) == ["plugin", "registry"]
    assert registry.PLUGIN == 2
    assert other.Y is token


def test_a_class_that_cannot_be_hashed_does_not_stop_a_reload(project: Project) -> None:
    source = "from tests.sync.test_reload import Actor\nclass Meta(type):\n    def __eq__(a, b): return a is b\n"
    project.write(project.before, a=source + "class Trainer(Actor, metaclass=Meta): pass")
    project.write(project.after, a=source + "class Trainer(Actor, metaclass=Meta): new = True")
    trainer = project.load("a").Trainer()
    assert project.execute().old_classes == (f"{project.prefix}a.Trainer",)
    assert not hasattr(trainer, "new")


HOSTILE = """
def refuse(cls):
    raise RuntimeError("no module")

class Raising(type):
    __module__ = property(refuse)

class Lazy:
    def __getattribute__(self, name):
        raise RuntimeError(f"{name} is not known yet")

class Odd(metaclass=Raising):
    method = Lazy()

lazy, odd = Lazy(), Odd()
"""


def test_objects_whose_attributes_raise_do_not_stop_a_reload(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.write(project.before, model="STEP = 1", user=f"from @model import STEP\n{HOSTILE}")
    project.write(project.after, model="STEP = 2", user=f"from @model import STEP\n{HOSTILE}")
    user = project.load("user")
    monkeypatch.setitem(sys.modules, "lazy_module", user.lazy)
    assert project.reload() == ["model", "user"]
    assert old_classes([user.Lazy, user.Odd], [user.__name__]) == ()


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
