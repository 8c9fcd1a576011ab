"""Implement `tandem config`: print the resolved settings as YAML that `--config` can read back."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap

from tandem.core.config import value_of
from tandem.core.settings import Resolved, settings

_WIDTH = 100
_COMMENT = "  # "


def run(resolved: Resolved, _args: argparse.Namespace) -> int:
    """Print the resolved settings as YAML, each with its meaning and origin as comments; returns the exit code 0."""
    section, lines = "", list[str]()
    for setting in settings():
        if setting.section != section:
            section = setting.section
            lines.append(f"{section}:")
        lines += textwrap.wrap(setting.doc, _WIDTH, initial_indent=_COMMENT, subsequent_indent=_COMMENT)
        text = f"  {setting.name}: {_scalar(value_of(resolved.config, setting.key))}"
        lines.append(f"{text:<44} # {resolved.origins[setting.key]}")
    try:
        print("\n".join(lines), flush=True)  # noqa: T201 - the command's output
    except BrokenPipeError:  # the reader has enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _scalar(value: object) -> str:
    """Return the YAML of one value; text is quoted, so that YAML does not read `off` as a boolean."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return str(value)
