"""Test that docs/architecture.md names functions, values and rooms that exist, and that its journeys are short."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
SERVICES = ROOT / "services" / "tandem"
PLACE = r"`([\w/]+\.py):([\w.]+)`"


class Journey(NamedTuple):
    """One section of the page: the functions of its numbered list and the values of its table, as (file, name)."""

    steps: list[tuple[str, str]]
    values: list[tuple[str, str]]


def journey(title: str) -> Journey:
    _, _, rest = PAGE.partition(f"## {title}\n")
    text, _, _ = rest.partition("\n## ")
    steps, _, values = text.partition("\n| representation |")
    return Journey(re.findall(PLACE, steps), re.findall(PLACE, values))


@functools.cache
def names_in(path: str) -> frozenset[str]:
    """Return qualified names of the functions, methods, classes and type aliases of a file."""
    found: set[str] = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + node.name)
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign):
                found.update(prefix + target.id for target in node.targets if isinstance(target, ast.Name))
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(prefix + node.target.id)

    visit(ast.parse((SERVICES / path).read_text()).body, "")
    return frozenset(found)


@pytest.mark.parametrize(
    ("title", "num_files", "num_values"),
    [("One chat request", 60, 10), ("One token", 22, 8), ("One KV block", 22, 8)],
)
def test_a_journey_is_short_and_its_places_exist(title: str, num_files: int, num_values: int) -> None:
    steps, values = journey(title)
    assert len(steps) >= 10 and len(values) >= 4
    for path, name in [*steps, *values]:
        assert (SERVICES / path).is_file(), path
        assert name in names_in(path), f"{path}:{name}"
    assert len({path for path, _ in steps}) <= num_files
    assert len(values) <= num_values


def test_the_map_and_the_page_have_every_room() -> None:
    rooms = {path.parent.name for path in SERVICES.glob("*/__init__.py")}
    mapped = set(re.findall(r'class="room"[^>]*>(\w+)<', (ROOT / "docs/rooms.svg").read_text()))
    assert mapped == rooms
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == rooms
