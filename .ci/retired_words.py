"""Print each identifier, setting, metric and log line that holds a retired word; exit with 1 when there is one.

The words are those that docs/glossary.md replaces. Words of the Python standard library and of hypothesis that the
code has to call by their names are allowed.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_WORDS = """
giver givers taker takers loan loans borrow borrowed borrowing borrows borrower lend lent lending lends lender
way ways told tell tells telling say says said hear heard hears ask asks asked asking strand strands course
receipt receipts standing standings evacuate evacuated evacuation departure departures parting entrance ration
rations draw draws drawn drawing crew crews whereabouts promise promised promises foresee foreseen doubt
doubted doubts manner manners want wants wanted aftermath chronicle hindsight lookout yardstick attest
attestor attested come comes came mover movers desk desks roster rosters drafter drafters
"""
RETIRED = frozenset(_WORDS.split())
ALLOWED = frozenset({"draw", "DrawFn", "tell", "SSLWantReadError", "SSLWantWriteError"})
"""hypothesis' `data.draw` and `DrawFn`, `file.tell`, exceptions of `ssl`."""
LOG_METHODS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})


def words_in(name: str) -> set[str]:
    """Split a name in snake_case or CamelCase into its words in lower case."""
    return {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def retired_identifiers(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each identifier that holds a retired word."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and token.string not in ALLOWED and words_in(token.string) & RETIRED:
            yield token.start[0], token.string


def retired_messages(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each log message that holds a retired word."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOG_METHODS:
            for part in node.args[:1]:
                for text in (
                    n.value for n in ast.walk(part) if isinstance(n, ast.Constant) and isinstance(n.value, str)
                ):
                    if set(re.findall(r"[a-z]+", text.lower())) & RETIRED:
                        yield node.lineno, text


def retired_metrics(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each metric name, `tandem.x.y`, that holds a retired word."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            continue
        if re.fullmatch(r"(tandem|vllm)[.:_][a-z_.]+", node.value) and words_in(node.value) & RETIRED:
            yield node.lineno, node.value


def main() -> int:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = False
    for path in listed.splitlines():
        if "/gen/" in path or not (ROOT / path).exists():
            continue
        source = (ROOT / path).read_text(encoding="utf-8")
        hits = [*retired_identifiers(source), *retired_metrics(source)]
        if path.startswith("services/"):
            hits += retired_messages(source)
        for line, text in hits:
            found = True
            print(f"{path}:{line}: {text}")
    return int(found)


if __name__ == "__main__":
    sys.exit(main())
