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
    except OSError as error:
        raise _refuse(f"cannot read settings file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _refuse(f"settings file {path} is not UTF-8 text: {error}") from error
    except yaml.YAMLError as error:
        raise _refuse(f"settings file {path} is not valid YAML: {_problem(error)}") from error
    if not isinstance(value, dict):
        raise _refuse(f"settings file {path} must hold a mapping of sections, such as `engine: {{block_size: 16}}`")
    return value


def _problem(error: yaml.YAMLError) -> str:
    """Return what is wrong on one line, with line and column where they are known."""
    mark = getattr(error, "problem_mark", None)
    return f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', '')}" if mark else str(error)


def _refuse(message: str) -> TandemError:
    return TandemError(ErrorKind.INVALID_REQUEST, message)
