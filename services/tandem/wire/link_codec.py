"""Encode and decode reports on links between workers as messages of worker.proto."""

from __future__ import annotations

import math

from tandem.core.link import LINK_TYPES, LinkReport, LinkType
from tandem.wire.gen import worker_pb2 as pb
from tandem.wire.kv_codec import decode_worker, encode_worker, require


def encode_link(report: LinkReport) -> pb.LinkReport:
    return pb.LinkReport(
        source=encode_worker(report.source),
        link_type=report.link_type,
        evidence=report.evidence,
        num_bytes=report.num_bytes,
        seconds=report.seconds,
        problem=report.problem,
        refused=report.refused,
    )


def decode_link(message: pb.LinkReport) -> LinkReport:
    """Decode a report; a link type that only newer versions know becomes `unknown`. Raises
    TandemError(INVALID_REQUEST)."""
    require(math.isfinite(message.seconds) and message.seconds >= 0, "a link report has an invalid duration")
    return LinkReport(
        source=decode_worker(message.source),
        link_type=_link_type(message.link_type),
        evidence=message.evidence,
        num_bytes=message.num_bytes,
        seconds=message.seconds,
        problem=message.problem,
        refused=message.refused,
    )


def _link_type(name: str) -> LinkType:
    return next((known for known in LINK_TYPES if known == name), "unknown")
