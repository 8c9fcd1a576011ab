"""Every file says first what it owns and what it never does; for short files one sentence can do."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    path
    for place in ("services", "kernels", ".ci", "tests")
    for path in (ROOT / place).rglob("*.py")
    if "gen" not in path.parts
)
LONG = 60
"""Lines from which a file of the product must also say what it does not do."""
LIMITS = ("never", "no ", "nothing", "nobody", "not ", "only", "without", "alone", "pure", "frozen", "everything else")


def docstring(path: Path) -> str:
    return " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_first_sentence_says_what_the_file_is(path: Path) -> None:
    text = docstring(path)
    if path.name == "__init__.py" and not path.read_text().strip():
        assert path.is_relative_to(ROOT / "tests"), "a package of the product says what it is"
        return
    assert text, "no docstring"
    assert text[0].isupper() or text[0] == "`", f"not a sentence: {text[:60]}"
    assert text.rstrip()[-1] in ".:`)", f"not a sentence: {text[-60:]}"


@pytest.mark.parametrize(
    "path",
    [p for p in FILES if not p.is_relative_to(ROOT / "tests") and len(p.read_text().splitlines()) >= LONG],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_it_also_says_where_the_file_ends(path: Path) -> None:
    first = docstring(path).split(". ")[0].lower()
    assert any(word in first for word in LIMITS), f"says not what it never does: {first}"
