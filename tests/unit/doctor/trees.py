"""Files of a machine that a test does not have, below a root of its own; never judges them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tandem.doctor.system import NOT_FOUND, Ran, System


def system(root: Path, files: Mapping[str, str], **variables: str) -> System:
    """With these files, by absolute name, and these variables alone; no program is installed."""
    for name, content in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return System(root, variables, _nothing)


def _nothing(command: Sequence[str], _limit_s: float, _environ: Mapping[str, str]) -> Ran:
    return Ran(NOT_FOUND, "", f"{command[0]}: No such file or directory")
