"""A file of settings as the mapping that `tandem.core.settings` takes for a layer; never judges what is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tandem.core.errors import ErrorKind, TandemError


def read_settings(path: Path) -> dict[str, Any]:
    """The sections of a YAML file, none of an empty one. Raises TandemError(INVALID_REQUEST)."""
    try:
        value = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise TandemError(ErrorKind.INVALID_REQUEST, f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise TandemError(ErrorKind.INVALID_REQUEST, f"{path} must hold a mapping of sections")
    return value
