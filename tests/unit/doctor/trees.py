"""Make the files of a simulated machine below a temporary root."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tandem.doctor.system import NOT_FOUND, Ran, System


def system(root: Path, files: Mapping[str, str], **variables: str) -> System:
    """Return a system with only these files (by absolute name) and variables, and without any program."""
    for name, content in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return System(root, variables, _nothing)


def _nothing(command: Sequence[str], _limit_s: float, _environ: Mapping[str, str]) -> Ran:
    return Ran(NOT_FOUND, "", f"{command[0]}: No such file or directory")
