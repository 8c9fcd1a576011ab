"""Implement `tandem config`: print the resolved settings as YAML that `--config` can read back."""

from __future__ import annotations

import argparse

from tandem.core.config import value_of
from tandem.core.settings import Resolved, settings


def run(resolved: Resolved, _args: argparse.Namespace) -> int:
    """Print the resolved settings as YAML, each with its origin and meaning as a comment; returns the exit code 0."""
    section = ""
    for setting in settings():
        if setting.section != section:
            section = setting.section
            print(f"{section}:")  # noqa: T201 - the command's output
        value = value_of(resolved.config, setting.key)
        text = f"  {setting.name}: {_scalar(value)}"
        print(f"{text:<44} # {resolved.origins[setting.key]}; {setting.doc}")  # noqa: T201
    return 0


def _scalar(value: object) -> str:
    """Return the YAML of one value; text is quoted, so that YAML does not read `off` as a boolean."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return str(value)
