"""Keeps files that are generated and committed; never says what is in them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def keep(meaning: str, target: Path, pattern: str, generate: Callable[[], dict[str, str]], command: str) -> int:
    """Make the files of `target` that match `pattern` what `generate` yields, name -> content; with `--check` only say
    which are not, and that `command` writes them. Returns the exit status."""
    parser = argparse.ArgumentParser(description=meaning)
    parser.add_argument("--check", action="store_true", help="only compare with the committed files")
    check = parser.parse_args().check
    expected = generate()
    found = {path.name: path.read_text() for path in target.glob(pattern)} if target.is_dir() else {}
    stale = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if not check:
        _write(target, expected, stale)
        return 0
    for name in stale:
        print(f"{target.name}/{name} is not what `{command}` writes", file=sys.stderr)
    return 1 if stale else 0


def _write(target: Path, expected: dict[str, str], stale: list[str]) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for name in stale:
        if name in expected:
            (target / name).write_text(expected[name])
        else:
            (target / name).unlink()
