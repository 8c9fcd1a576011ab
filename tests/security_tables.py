"""Read the tables of SECURITY.md, which tests compare with what runs."""

from __future__ import annotations

import re
from pathlib import Path

_TEXT = (Path(__file__).resolve().parents[1] / "SECURITY.md").read_text()


def security_table(heading: str) -> list[list[str]]:
    """Return the cells of the only table below a heading, without its first line."""
    section = re.split(r"^#", _TEXT.partition(f"# {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names(cell: str) -> set[str]:
    """Return what a cell has in backticks."""
    return set(re.findall(r"`([^`]+)`", cell))
