"""Prints the longest files, classes and functions of the product, a table each.

A size is a question, not a fault: is this one concept? `--number N` sets how many rows a table has.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GENERATED = ROOT / "services/tandem/wire/gen"
KINDS = ("file", "class", "function")


def sizes(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yield the kind, number of lines and place of a file and of all that it defines."""
    text, place = path.read_text(), str(path.relative_to(ROOT))
    yield "file", len(text.splitlines()), place
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            assert node.end_lineno is not None
            yield kind, node.end_lineno - node.lineno + 1, f"{place}:{node.lineno} {node.name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=20, help="rows of each table")
    number = parser.parse_args().number
    paths = [p for place in ("services", "kernels", ".ci") for p in (ROOT / place).rglob("*.py")]
    rows = [row for path in paths if GENERATED not in path.parents for row in sizes(path)]
    for kind in KINDS:
        print(f"\nlines  {kind}")
        longest = sorted(((lines, place) for found, lines, place in rows if found == kind), reverse=True)
        for lines, place in longest[:number]:
            print(f"{lines:5}  {place}")


if __name__ == "__main__":
    main()
