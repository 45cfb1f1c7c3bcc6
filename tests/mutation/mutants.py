"""The mutants of a module: each is its source with one small defect.

The defects are those that tests of decisions should notice: a comparison, a boolean, a number or a sign is changed, or
one statement is left out. Texts of errors, log lines, annotations and ``__repr__`` are left as they are.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
SIGNS: dict[type[ast.operator], tuple[str, str]] = {ast.Add: ("+", "-"), ast.Sub: ("-", "+")}
PLAIN = (ast.Name, ast.Attribute, ast.Call)  # conditions without an operator
UNOBSERVED = {"log", "logger", "warnings", "__repr__"}  # what it does is for readers, not for the program


@dataclass(frozen=True, slots=True)
class Mutant:
    """``source``: the module with the defect, which ``description`` names and which is in ``line`` of the original."""

    line: int
    description: str
    source: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.description}"


def mutants_of(source: str) -> list[Mutant]:
    """All mutants of a module, by line."""
    return sorted(_Finder(source).find(ast.parse(source)), key=lambda mutant: (mutant.line, mutant.description))


class _Finder:
    def __init__(self, source: str) -> None:
        self._source = source.encode()  # column offsets of the parser count bytes
        self._starts = [0]
        for line in self._source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def find(self, node: ast.AST) -> Iterator[Mutant]:
        if _unobserved(node):
            return
        yield from self._of_node(node)
        for name, value in ast.iter_fields(node):
            if name not in {"annotation", "returns", "decorator_list", "type_params"}:
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from self.find(child)

    def _of_node(self, node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield self._operator(node, node.left, node.comparators[0], *COMPARISONS[type(node.ops[0])])
        elif isinstance(node, ast.BoolOp):
            words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            yield self._operator(node, node.values[0], node.values[1], *words)
        elif isinstance(node, ast.BinOp) and type(node.op) in SIGNS and not _is_text(node):
            yield self._operator(node, node.left, node.right, *SIGNS[type(node.op)])
        elif isinstance(node, ast.AugAssign) and type(node.op) in SIGNS:
            old, new = SIGNS[type(node.op)]
            yield self._operator(node, node.target, node.value, f"{old}=", f"{new}=")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield self._replace(node, f"bool({self._text(node.operand)})", "leaves out `not`")
        elif isinstance(node, ast.If | ast.While | ast.IfExp) and isinstance(node.test, PLAIN):
            yield self._replace(node.test, f"(not {self._text(node.test)})", "negates the condition")
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield self._replace(node, str(node.value + 1), f"{node.value} + 1 for {node.value}")
        elif isinstance(node, ast.stmt) and _can_be_left_out(node):
            yield self._replace(node, "pass", f"leaves out `{self._text(node).splitlines()[0]}`")

    def _operator(self, node: ast.AST, left: ast.expr, right: ast.expr, old: str, new: str) -> Mutant:
        """Replaces the operator, which is the only one between two operands."""
        begin, end = self._span(left)[1], self._span(right)[0]
        between = self._source[begin:end].decode()
        replaced = self._source[:begin] + between.replace(old, new, 1).encode() + self._source[end:]
        return Mutant(node.lineno, f"`{new}` for `{old}`", replaced.decode())  # type: ignore[attr-defined]

    def _replace(self, node: ast.AST, text: str, description: str) -> Mutant:
        begin, end = self._span(node)
        replaced = self._source[:begin] + text.encode() + self._source[end:]
        return Mutant(node.lineno, description, replaced.decode())  # type: ignore[attr-defined]

    def _text(self, node: ast.AST) -> str:
        begin, end = self._span(node)
        return self._source[begin:end].decode()

    def _span(self, node: ast.AST) -> tuple[int, int]:
        begin = self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return begin, end


def _unobserved(node: ast.AST) -> bool:
    match node:
        case ast.FunctionDef(name=name):
            return name in UNOBSERVED
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name))):
            return name in UNOBSERVED
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
    return isinstance(node, ast.Raise | ast.JoinedStr)


def _is_text(node: ast.BinOp) -> bool:
    """Whether a sum surely joins texts, of which there is no difference."""
    return any(
        isinstance(each, ast.JoinedStr | ast.List | ast.Tuple)
        or (isinstance(each, ast.Constant) and isinstance(each.value, str | bytes))
        for each in (node.left, node.right)
    )


def _can_be_left_out(node: ast.stmt) -> bool:
    """A call whose value is not used, or an assignment to an attribute or item, which need not exist to run on."""
    match node:
        case ast.Expr(value=ast.Call() | ast.Await()):
            return not any(_unobserved(child) for child in ast.walk(node))
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return True
        case ast.Delete():
            return True
    return False
