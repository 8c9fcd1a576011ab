"""Read the report of a load test, or of a simulated run in the same shape, from a file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from loadtest.load import simulated
from loadtest.load.load_report import LoadReport
from tandem.cli.simulate import FORMAT


class NoReport(Exception):
    """Raised when a file holds no report of a load test; the message names the file and the field."""


class _Kind(msgspec.Struct):
    """Format field of a file; a load test's report has none."""

    format: str = ""


def read_report(path: Path) -> LoadReport:
    """Read the report that `loadtest load --json` or `tandem simulate --json` wrote. Raises NoReport."""
    try:
        raw = path.read_bytes()
        if msgspec.json.decode(raw, type=_Kind).format == FORMAT:
            return simulated.decoded(raw)
        return msgspec.json.decode(raw, type=LoadReport)
    except OSError as error:
        raise NoReport(f"{path}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise NoReport(f"{path} is no report: {error}") from error
