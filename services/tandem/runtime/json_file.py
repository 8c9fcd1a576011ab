"""Read JSON files of a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tandem.core.errors import ErrorKind, TandemError


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if the file does not exist. Raises TandemError for any other content."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TandemError(ErrorKind.UNSUPPORTED, f"{path} is not JSON: {error}", param="model") from None
    if not isinstance(value, dict):
        raise TandemError(ErrorKind.UNSUPPORTED, f"{path} is not a JSON object", param="model")
    return value
