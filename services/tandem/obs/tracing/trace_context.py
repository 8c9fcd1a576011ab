"""Parse and format the headers of W3C Trace Context. Invalid headers count as missing.

https://www.w3.org/TR/trace-context-2/ defines their syntax."""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_TRACESTATE = 512
"""Characters; longer headers count as missing, so that no client's header is carried far."""

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_KEY = r"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
_VALUE = r"[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
_ENTRY = re.compile(f"({_KEY})=({_VALUE})")
_MAX_ENTRIES = 32
SAMPLED, RANDOM = 1, 2
"""Bits of the flags. RANDOM: the last 56 bits of the trace id are random."""
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
_BYTES = tuple(f"{byte:02x}" for byte in range(256))


class TraceParent(NamedTuple):
    """Span that caused the work here.

    `trace` and `span` are 32 and 16 hexadecimal digits, not all 0; `flags` is a byte."""

    trace: str
    span: str
    flags: int

    @property
    def is_sampled(self) -> bool:
        return bool(self.flags & SAMPLED)


def parse_traceparent(text: str) -> TraceParent | None:
    """Return the header's content; None where the standard ignores the header. Of later versions only the fields of the
    first version are read."""
    found = _TRACEPARENT.fullmatch(text)
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    if version == "ff" or (version == "00" and more is not None):
        return None
    return None if trace == _NO_TRACE or span == _NO_SPAN else TraceParent(trace, span, int(flags, 16))


def format_traceparent(parent: TraceParent) -> str:
    return f"00-{parent.trace}-{parent.span}-{_BYTES[parent.flags]}"


def parse_tracestate(text: str) -> list[tuple[str, str]]:
    """Return the entries of all vendors in their order; empty where any of the header is invalid."""
    if len(text) > MAX_TRACESTATE:
        return []
    found = [_ENTRY.fullmatch(entry.strip(" \t")) for entry in text.split(",") if entry.strip(" \t")]
    pairs = [(match[1], match[2]) for match in found if match is not None]
    is_valid = len(pairs) == len(found) == len({key for key, _ in pairs}) and len(pairs) <= _MAX_ENTRIES
    return pairs if is_valid else []


def normalize_tracestate(text: str) -> str:
    """Return the header without empty entries; empty where it is invalid."""
    return ",".join(f"{key}={value}" for key, value in parse_tracestate(text))
