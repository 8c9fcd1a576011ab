"""Encode and decode reports on links between workers as messages of worker.proto."""

from __future__ import annotations

import math

from tandem.core.link import LINK_TYPES, LinkReport, LinkType
from tandem.wire.gen import worker_pb2 as pb
from tandem.wire.kv_codec import decode_worker, encode_worker, require, same_fields

_SAME = ("evidence", "num_bytes", "seconds", "problem", "refused")


def encode_link(report: LinkReport) -> pb.LinkReport:
    """Encode a worker's report on the link over which it reads another worker."""
    source = encode_worker(report.source)
    return pb.LinkReport(source=source, link_type=report.link_type, **same_fields(report, _SAME))


def decode_link(message: pb.LinkReport) -> LinkReport:
    """Decode a report on a link; a link type that only newer versions know becomes `unknown`.

    Raises TandemError(INVALID_REQUEST) where the report is malformed.
    """
    require(math.isfinite(message.seconds) and message.seconds >= 0, "a link report has an invalid duration")
    source, link_type = decode_worker(message.source), _link_type(message.link_type)
    return LinkReport(source=source, link_type=link_type, **same_fields(message, _SAME))


def _link_type(name: str) -> LinkType:
    return next((known for known in LINK_TYPES if known == name), "unknown")
