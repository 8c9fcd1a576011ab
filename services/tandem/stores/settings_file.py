"""Read a YAML settings file into a mapping, which `tandem.core.settings` validates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tandem.core.errors import ErrorKind, TandemError


def read_settings(path: Path) -> dict[str, Any]:
    """Return the sections of a YAML settings file by name; an empty file has none.

    Raises TandemError(INVALID_REQUEST) where the file cannot be read or is no mapping.
    """
    try:
        value = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise TandemError(ErrorKind.INVALID_REQUEST, f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise TandemError(ErrorKind.INVALID_REQUEST, f"{path} must hold a mapping of sections")
    return value
