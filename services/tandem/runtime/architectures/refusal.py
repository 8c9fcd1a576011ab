"""Build the error for a model with a feature that is not supported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.core.errors import ErrorKind, TandemError

Json = Mapping[str, Any]


def unsupported(what: str) -> TandemError:
    """Return, without raising it, the TandemError(UNSUPPORTED) for a model with the feature that `what` names."""
    return TandemError(ErrorKind.UNSUPPORTED, f"this model is not supported: {what}", param="model")
