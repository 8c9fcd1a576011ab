"""Finds the places of a source file where one small change makes a mutant, and applies such a change to the text.

A mutant is a wrong program that differs from the right one in one expression or statement. Annotations, docstrings,
assertions, decorators, default values, log calls and code at module level are left alone: a change of those is either
found by mypy or changes nothing that a test could see.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
_OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
    ast.BitXor: ("^", "|"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
_LOGS = re.compile(r"\b(log|logger|_log|_logger|warn|warnings)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True, order=True)
class Mutant:
    """`text[start:stop]` of the file at `path`, which is relative to the checkout, becomes `new`; `lines` are the first
    and last line of the statement that it is in."""

    path: str
    start: int
    stop: int
    old: str
    new: str
    lines: tuple[int, int]

    @property
    def name(self) -> str:
        """`path:line: old -> new`, on one line."""
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.path}:{self.lines[0]}: {old} -> {new}"

    def apply(self, text: str) -> str:
        """Return the text of the wrong program. Raises ValueError when the text is not the one it was made for."""
        if text[self.start : self.stop] != self.old:
            raise ValueError(f"{self.name}: the file has changed")
        return text[: self.start] + self.new + text[self.stop :]


def find_mutants(path: str, text: str) -> list[Mutant]:
    """Return all mutants of a file, in the order of their places."""
    finder = _Finder(path, text)
    finder.visit(ast.parse(text))
    return sorted(finder.found)


class _Finder(ast.NodeVisitor):
    """Visits the bodies of functions; `found` has the mutants so far."""

    def __init__(self, path: str, text: str) -> None:
        self.found: list[Mutant] = []
        self._path = path
        self._text = text
        lines = text.splitlines(keepends=True)
        self._line_bytes = [line.encode() for line in lines]
        self._line_starts = [0]
        for line in lines:
            self._line_starts.append(self._line_starts[-1] + len(line))
        self._statement: ast.stmt | None = None

    def _at(self, line: int, column: int) -> int:
        """Return the offset in the text of a place as `ast` gives it: a line from 1 and a column in bytes."""
        return self._line_starts[line - 1] + len(self._line_bytes[line - 1][:column].decode())

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _add(self, start: int, stop: int, new: str) -> None:
        statement = self._statement
        assert statement is not None
        last = statement.end_lineno or statement.lineno
        if isinstance(statement, ast.If | ast.While):
            last = statement.test.end_lineno or last
        elif isinstance(statement, ast.For | ast.AsyncFor | ast.With | ast.AsyncWith | ast.Match | ast.Try):
            last = statement.lineno
        self.found.append(Mutant(self._path, start, stop, self._text[start:stop], new, (statement.lineno, last)))

    def _replace(self, node: ast.expr | ast.stmt, new: str) -> None:
        self._add(*self._span(node), new)

    def _between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        """Replace an operator between two operands; parentheses may stand there too."""
        start, stop = self._span(left)[1], self._span(right)[0]
        found = re.search(old, self._text[start:stop])
        if found is not None:
            self._add(start + found.start(), start + found.end(), new)

    # ---- where to look

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer = self._statement
        body = node.body[1:] if ast.get_docstring(node) else node.body
        for statement in body:
            self._statement = statement
            self.visit(statement)
        self._statement = outer

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self._statement = node if self._statement is not None else None
        super().visit(node)

    def generic_visit(self, node: ast.AST) -> None:
        if self._statement is None:  # module or class level: only what functions are inside
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.stmt):
                    self.visit(child)
            return
        super().generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if self._statement is not None and node.value is not None:
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    # ---- what to change: expressions are visited only inside of functions

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            old, new = _COMPARISONS[type(operator)]
            self._between(left, right, old if "\\s" in old or old.isalpha() else re.escape(old), new)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_text = any(isinstance(side, ast.JoinedStr) or _is_text(side) for side in (node.left, node.right))
        if type(node.op) in _OPERATORS and not is_text:
            old, new = _OPERATORS[type(node.op)]
            self._between(node.left, node.right, re.escape(old), new)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = (r"\band\b", "or") if isinstance(node.op, ast.And) else (r"\bor\b", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between(left, right, old, new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            start, stop = self._span(node.operand)
            self._replace(node, f"bool({self._text[start:stop]})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, str(not node.value))
        elif isinstance(node.value, int):
            self._replace(node, str(node.value + 1))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Places inside of f-strings are wrong before Python 3.12, and what is written there is read by people."""

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if self._statement is not None and not isinstance(node.test, ast.Constant):
            start, stop = self._span(node.test)
            self._add(start, stop, f"not ({self._text[start:stop]})")
        self.generic_visit(node)

    visit_While = visit_If
    visit_IfExp = visit_If

    def visit_Call(self, node: ast.Call) -> None:
        if _LOGS.search(ast.unparse(node.func)):
            return
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            self._replace(node.func, "max" if node.func.id == "min" else "min")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if self._statement is None or isinstance(node.value, ast.Constant):
            return
        if isinstance(node.value, ast.Call | ast.Await) and not _LOGS.search(ast.unparse(node.value)):
            self._replace(node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign | ast.AugAssign) -> None:
        if self._statement is None:
            return
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if isinstance(node, ast.AugAssign) or all(isinstance(t, ast.Attribute | ast.Subscript) for t in targets):
            self._replace(node, "pass")
        self.visit(node.value)

    visit_AugAssign = visit_Assign


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def iter_mutants(root: Path, room: str) -> Iterator[Mutant]:
    """Yield all mutants of the Python files below `services/tandem/<room>`."""
    for path in sorted((root / "services/tandem" / room).rglob("*.py")):
        yield from find_mutants(str(path.relative_to(root)), path.read_text())
