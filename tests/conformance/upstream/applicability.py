"""Which of Monarch's tests a gateway has to pass, decided by rules on their source. The first rule that matches gives
the reason why a test does not apply.

A test applies if all that it uses of Monarch is public: a name of ``monarch.actor``, ``monarch.config``,
``monarch.job``, ``monarch.spmd`` or a mount. It may import it from where Monarch keeps it. What a test uses is what its
function, its fixtures and its class use, and what the functions and classes of its file that it names use in turn. A
private attribute that the file reads when it is imported is one of each test.
"""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from tests.conformance.upstream.tree import Test, find_tests, lineage

RULES = {
    "module": "needs a module that is not installed",
    "mock": "replaces a part of Monarch with a mock",
    "attribute": "uses a private attribute of Monarch's",
    "rust": "tests Monarch's Rust bindings",
    "private": "uses a private name of Monarch's",
    "refused": "uses a name that meshgate refuses, with a reason (docs/compatibility.md, Names)",
    "other": "tests a part of Monarch that has no counterpart in a driver",
    "none": "uses nothing of Monarch's",
}
_CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")  # a number or a path, which the driver may take from Monarch
_MODULE_IN_STRING = re.compile(r"monarch(\.[a-z_]+)+")
_MOCK = re.compile(r"(^|\.)patch(\.object|\.dict|\.multiple)?$|monkeypatch\.(setattr|delattr)$")
_SOURCE_IN_STRING = re.compile(r"^\s*from (monarch[\w.]*) import \(?([\w, ]+)", re.MULTILINE)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Definition = ast.stmt


@dataclass(frozen=True)
class Verdict:
    """``rule`` is a key of RULES, or "" if the test applies; ``detail`` names what matched."""

    rule: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Names:
    """What the rules know of Monarch's names.

    ``public(module, name)`` is whether a driver has the name here; ``refused(name)`` the reason if it does not have the
    name, the member of a class or the setting on purpose, or ""; ``is_module(path)`` whether a path is one of Monarch's
    modules; ``missing(module)`` whether a module that is not Monarch's cannot be imported.
    """

    public: Callable[[str, str], bool]
    refused: Callable[[str], str]
    is_module: Callable[[str], bool]
    missing: Callable[[str], bool]


@dataclass
class _Uses:
    """What a test uses, collected over the definitions that it reaches."""

    monarch: set[tuple[str, str]] = field(default_factory=set)  # (module, name)
    modules: set[str] = field(default_factory=set)  # others, by their first component
    private: set[str] = field(default_factory=set)
    mocked: set[str] = field(default_factory=set)
    members: set[str] = field(default_factory=set)  # ".NAME", ".FUNCTION(PARAMETER)" and settings, "config.NAME"


def judge(module: ast.Module, file: str, names: Names) -> dict[Test, Verdict]:
    """The verdict of each test of a file."""
    source = _File(module, names)
    return {test: _verdict(source.uses_of(test), names) for test in find_tests(module, file)}


def _verdict(uses: _Uses, names: Names) -> Verdict:
    if missing := sorted(filter(names.missing, uses.modules)):
        return Verdict("module", missing[0])
    if uses.mocked:
        return Verdict("mock", min(uses.mocked))
    if uses.private:
        return Verdict("attribute", min(uses.private))
    if refused := sorted(each for each in uses.members if names.refused(each)):
        return Verdict("refused", f"{refused[0].lstrip('.')}: {names.refused(refused[0])}")
    found = sorted(filter(None, (_judge_name(each, names) for each in uses.monarch)))
    if found:
        order = list(RULES)
        rule, detail = min(found, key=lambda each: order.index(each[0]))
        return Verdict(rule, detail)
    return Verdict("none") if all(_CONSTANT.fullmatch(name) for _, name in uses.monarch) else Verdict()


def _judge_name(used: tuple[str, str], names: Names) -> tuple[str, str] | None:
    module, name = used
    if names.public(module, name):
        return None
    if reason := names.refused(f"{module}.{name}"):
        return "refused", f"{name}: {reason}"
    if _CONSTANT.fullmatch(name):
        return None
    full = f"{module}.{name}" if name else module
    if "_rust_bindings" in full:
        return "rust", full
    if any(part.startswith("_") and not part.startswith("__") for part in full.split(".")):
        return "private", full
    return "other", full


class _File:
    """A file of tests: its imports, and its definitions by name."""

    def __init__(self, tree: ast.Module, names: Names) -> None:
        self._names = names
        self._definitions: dict[str, list[Definition]] = {}
        self._imports = dict(_imports(tree.body))
        self._needed = {module.split(".")[0] for _, (module, _) in _imports(tree.body, flat=False)} - {"monarch"}
        self._own_attributes = _own_attributes(tree)
        self._classes = {each.name: each for each in tree.body if isinstance(each, ast.ClassDef)}
        self._autouse: list[Definition] = []
        for statement in _flat(tree.body):
            for name in _bound_by(statement):
                self._definitions.setdefault(name, []).append(statement)
            decorators = statement.decorator_list if isinstance(statement, _FUNCTIONS) else []
            if any("autouse=True" in ast.unparse(each) for each in decorators):
                self._autouse.append(statement)
        self._at_import = _Uses()
        for statement in _flat(tree.body):
            if not isinstance(statement, (*_FUNCTIONS, ast.ClassDef, ast.If, ast.Try, ast.With)):
                deque(self._collect(statement, self._at_import), 0)

    def uses_of(self, test: Test) -> _Uses:
        uses = _Uses(modules=set(self._needed), private=set(self._at_import.private))
        seen: set[int] = set()
        waiting: list[ast.AST] = [test.node, *self._autouse, *self._definitions.get("pytestmark", [])]
        if test.owner is not None:  # its other tests are not this one's
            for owner in lineage(test.owner, self._classes):
                waiting += [each for each in owner.body if not _is_test(each)] + list(owner.decorator_list)
        while waiting:
            node = waiting.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            for name in self._collect(node, uses):
                waiting += self._definitions.get(name, [])
        return uses

    def _collect(self, node: ast.AST, uses: _Uses) -> Iterator[str]:
        """Adds what ``node`` uses to ``uses``, and yields the names that it reads."""
        local = dict(_imports([each for each in ast.walk(node) if isinstance(each, ast.stmt)]))
        uses.modules.update(module.split(".")[0] for module, _ in local.values() if not _is_monarchs(module))
        imports = {**self._imports, **local}
        chained: set[int] = set()
        for each in ast.walk(node):
            if isinstance(each, ast.Attribute) and id(each) not in chained:
                self._collect_chain(each, imports, uses, chained)
            elif isinstance(each, ast.Name) and id(each) not in chained:
                self._use(imports, each.id, [], uses)
            elif isinstance(each, ast.Constant) and isinstance(each.value, str):
                uses.monarch.update(_named_in(each.value))
            elif isinstance(each, ast.Call):
                uses.mocked.update(_mocked(each, imports))
                uses.members.update(_passed(each, node))
            if isinstance(each, ast.Name):
                yield each.id
            elif isinstance(each, ast.arg):
                yield each.arg  # a fixture

    def _collect_chain(
        self, node: ast.Attribute, imports: Mapping[str, tuple[str, str]], uses: _Uses, chained: set[int]
    ) -> None:
        names: list[str] = []
        value: ast.expr = node
        while isinstance(value, ast.Attribute):
            names.append(value.attr)
            chained.add(id(value))
            value = value.value
        names.reverse()
        uses.members.update(f".{each}" for each in names)
        root = value.id if isinstance(value, ast.Name) else ""
        if root:
            chained.add(id(value))
            names = names[1:] if root in ("self", "cls") else self._use(imports, root, names, uses)
        uses.private.update(each for each in names if _is_private(each) and each not in self._own_attributes)

    def _use(self, imports: Mapping[str, tuple[str, str]], root: str, attributes: list[str], uses: _Uses) -> list[str]:
        """Adds what a path that begins with ``root`` names; returns what follows that name in the path, if it may be
        Monarch's.
        """
        if root not in imports:
            return attributes
        module, name = imports[root]
        if not _is_monarchs(module):
            uses.modules.add(module.split(".")[0])
            return []
        path = [*module.split("."), *([name] if name else [])]
        left = list(attributes)
        while left and self._names.is_module(".".join(path)):
            path.append(left.pop(0))
        if left and _CONSTANT.fullmatch(path[-1]):  # no number, and no path
            path[-1] += f".{left[0]}"
        whole = self._names.is_module(".".join(path))
        uses.monarch.add((".".join(path), "") if whole else (".".join(path[:-1]), path[-1]))
        return left


def _imports(statements: list[ast.stmt], flat: bool = True) -> Iterator[tuple[str, tuple[str, str]]]:
    """Each name that import statements bind, with its module and the name there, or "" if it is the module itself."""
    for each in _flat(statements) if flat else statements:
        if isinstance(each, ast.Import):
            for alias in each.names:
                target = alias.name if alias.asname else alias.name.split(".")[0]
                yield alias.asname or target, (target, "")
        elif isinstance(each, ast.ImportFrom) and each.module and not each.level:
            for alias in each.names:
                yield alias.asname or alias.name, (each.module, alias.name)


def _flat(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements, and those inside ``if``, ``try`` and ``with`` blocks."""
    for each in statements:
        yield each
        for block in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(each, (ast.If, ast.Try, ast.With)):
                for inner in getattr(each, block, []):
                    yield from _flat(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def _bound_by(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [each.id for target in targets if target for each in ast.walk(target) if isinstance(each, ast.Name)]


def _own_attributes(module: ast.Module) -> set[str]:
    """The private attributes that the file itself defines, of its own classes."""
    found = set()
    for each in ast.walk(module):
        if isinstance(each, (*_FUNCTIONS, ast.ClassDef)):
            found.add(each.name)
        elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self":
            found.add(each.attr)
        elif isinstance(each, ast.ClassDef):
            found.update(name for statement in each.body for name in _bound_by(statement))
    return found


def _passed(call: ast.Call, test: ast.AST) -> Iterator[str]:
    """The parameters and the settings that a call names; with ``**``, the settings are the strings of the ``test``."""
    function = ast.unparse(call.func).rsplit(".", 1)[-1]
    for keyword in call.keywords:
        if function not in ("configure", "configured"):
            yield f".{function}({keyword.arg})"
        elif keyword.arg:
            yield f"config.{keyword.arg}"
        else:
            yield from (f"config.{each.value}" for each in ast.walk(test) if isinstance(each, ast.Constant))


def _named_in(text: str) -> Iterator[tuple[str, str]]:
    """What a string names of Monarch: a module for ``python -m``, or the imports of a program."""
    if _MODULE_IN_STRING.fullmatch(text):
        module, _, name = text.rpartition(".")
        yield module, name
    for module, imported in _SOURCE_IN_STRING.findall(text):
        for name in filter(None, map(str.strip, imported.split(","))):
            yield module, name.split(" as ")[0].strip()


def _mocked(call: ast.Call, imports: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    """What of Monarch's a call of ``patch`` or ``monkeypatch`` replaces."""
    function = ast.unparse(call.func)
    if not call.args or not _MOCK.search(function):
        return
    target = call.args[0]
    if isinstance(target, ast.Constant):
        if _is_monarchs(str(target.value)):
            yield str(target.value)
        return
    root = ast.unparse(target).split(".")[0].split("(")[0]
    if _is_monarchs(imports.get(root, ("", ""))[0]):
        yield ast.unparse(target)


def _is_test(node: ast.AST) -> bool:
    return isinstance(node, _FUNCTIONS) and node.name.startswith("test")


def _is_monarchs(module: str) -> bool:
    return module == "monarch" or module.startswith("monarch.")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))
