"""Reads the report of a load test from a file, or that of a simulated run in the same shape; never writes one."""

from __future__ import annotations

from pathlib import Path

import msgspec

from loadtest.load import simulated
from loadtest.load.load_report import LoadReport
from tandem.cli.simulate import FORMAT


class NoReport(Exception):
    """A file is no report of a load test; names it and the field."""


class _Kind(msgspec.Struct):
    """A load test's has no format."""

    format: str = ""


def read_report(path: Path) -> LoadReport:
    """Of `loadtest load --json` or `tandem simulate --json`. Raises NoReport."""
    try:
        raw = path.read_bytes()
        if msgspec.json.decode(raw, type=_Kind).format == FORMAT:
            return simulated.decoded(raw)
        return msgspec.json.decode(raw, type=LoadReport)
    except OSError as error:
        raise NoReport(f"{path}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise NoReport(f"{path} is no report: {error}") from error
