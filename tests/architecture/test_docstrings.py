"""Every file says first what it owns and what it never does; for short files one sentence can do."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("services", "kernels", ".ci", "tests")
LONG = 60
"""Lines from which a file of the product must also say what it does not do."""
LIMITS = ("never", "no ", "nothing", "nobody", "not ", "only", "without", "alone", "pure", "frozen", "everything else")


def docstring(text: str) -> str:
    """Of a module; to parse all of every file takes seconds."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.STRING:
            return str(ast.literal_eval(token.string))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            break
    return ""


def what_is_wrong(path: Path) -> str:
    text = path.read_text()
    said = " ".join(docstring(text).split())
    if path.name == "__init__.py" and not text.strip():
        return "" if path.is_relative_to(ROOT / "tests") else "a package of the product says what it is"
    if not said:
        return "no docstring"
    if not (said[0].isupper() or said[0] == "`"):
        return f"not a sentence: {said[:60]}"
    if said[-1] not in ".:`)":
        return f"not a sentence: {said[-60:]}"
    first = said.split(". ")[0].lower()
    is_long = not path.is_relative_to(ROOT / "tests") and len(text.splitlines()) >= LONG
    if is_long and not any(word in first for word in LIMITS):
        return f"says not what it never does: {first}"
    return ""


@pytest.mark.parametrize("place", PLACES)
def test_the_first_sentence_says_what_a_file_is_and_where_it_ends(place: str) -> None:
    files = [path for path in (ROOT / place).rglob("*.py") if "gen" not in path.parts]
    told = {str(path.relative_to(ROOT)): what_is_wrong(path) for path in files}
    assert told and {path: wrong for path, wrong in told.items() if wrong} == {}


@pytest.mark.parametrize(
    ("name", "text", "wrong"),
    [
        ("services/a.py", "", "no docstring"),
        ("services/__init__.py", "", "a package of the product says what it is"),
        ("tests/__init__.py", "", ""),
        ("services/a.py", '"""what it is."""', "not a sentence: what it is."),
        ("services/a.py", '"""What it is"""', "not a sentence: What it is"),
        ("services/a.py", '"""What it is."""\n' + "\n" * LONG, "says not what it never does: what it is."),
        ("tests/a.py", '"""What it is."""\n' + "\n" * LONG, ""),
        ("services/a.py", '"""What it is; never more."""\n' + "\n" * LONG, ""),
    ],
)
def test_what_is_wrong_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, wrong: str
) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    path = tmp_path / name
    path.parent.mkdir()
    path.write_text(text)
    assert what_is_wrong(path) == wrong
