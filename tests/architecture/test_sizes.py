"""Files, classes and functions stay small enough to be read at once; ruff has no such rule."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE_LINES, CLASS_LINES, FUNCTION_LINES = 400, 300, 40

EXEMPT = "services/tandem/wire/gen/"
"""Generated code."""

KERNELS = "kernels/tandem_kernels/triton/"
"""Where functions may be of any size: a kernel cannot be cut into functions at will, and takes all that it needs."""

ALLOWED: dict[str, tuple[int, str]] = {}
"""`file` or `file:name` -> the lines it may have and why. It may only shrink: an entry that is not needed fails."""


def python_files() -> list[Path]:
    found = [p for place in ("services", "kernels", ".ci") for p in (ROOT / place).rglob("*.py")]
    return [p for p in sorted(found) if not str(p.relative_to(ROOT)).startswith(EXEMPT)]


def sizes(path: Path) -> Iterator[tuple[str, int, int]]:
    """(name, lines, limit) of the file and of all that it defines."""
    name, text = str(path.relative_to(ROOT)), path.read_text()
    yield name, len(text.splitlines()), FILE_LINES
    measured = ast.ClassDef if name.startswith(KERNELS) else ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, measured):
            limit = CLASS_LINES if isinstance(node, ast.ClassDef) else FUNCTION_LINES
            assert node.end_lineno is not None
            yield f"{name}:{node.name}", node.end_lineno - node.lineno + 1, limit


def test_everything_is_small_enough() -> None:
    large = {name: lines for path in python_files() for name, lines, limit in sizes(path) if lines > limit}
    assert {name: lines for name, lines in large.items() if name not in ALLOWED} == {}
    assert {
        name: large.get(name, 0) for name, (lines, _) in ALLOWED.items() if not 0 < large.get(name, 0) <= lines
    } == {}


def test_something_was_measured() -> None:
    assert len(python_files()) > 20
