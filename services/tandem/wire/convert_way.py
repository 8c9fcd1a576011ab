"""Reports on ways between workers as messages of worker.proto and back; never judges a way."""

from __future__ import annotations

import math

from tandem.core.way import WAY_NAMES, WayName, WayReport
from tandem.wire.convert_kv import decode_worker, encode_worker, require
from tandem.wire.gen import worker_pb2 as pb


def encode_way(report: WayReport) -> pb.WayReport:
    return pb.WayReport(
        source=encode_worker(report.source),
        way=report.way,
        evidence=report.evidence,
        num_bytes=report.num_bytes,
        seconds=report.seconds,
        problem=report.problem,
        refused=report.refused,
    )


def decode_way(message: pb.WayReport) -> WayReport:
    """A way that only newer versions know is unknown. Raises TandemError(INVALID_REQUEST)."""
    require(math.isfinite(message.seconds) and message.seconds >= 0, "bytes moved in a time that is none")
    return WayReport(
        source=decode_worker(message.source),
        way=_way(message.way),
        evidence=message.evidence,
        num_bytes=message.num_bytes,
        seconds=message.seconds,
        problem=message.problem,
        refused=message.refused,
    )


def _way(name: str) -> WayName:
    return next((known for known in WAY_NAMES if known == name), "unknown")
