"""Reads and writes the headers of W3C Trace Context; never repairs or logs one.

https://www.w3.org/TR/trace-context-2/ has their syntax.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_TRACESTATE = 512
"""Characters; what is longer counts as none, so that no client's header is carried far."""

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_KEY = r"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
_VALUE = r"[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
_MEMBER = re.compile(f"({_KEY})=({_VALUE})")
_MAX_MEMBERS = 32
SAMPLED, RANDOM = 1, 2
"""Bits of the flags; the other says that the last 56 bits of the trace's id are random."""
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
_BYTES = tuple(f"{byte:02x}" for byte in range(256))


class TraceParent(NamedTuple):
    """Who caused us. `trace` and `span` are 32 and 16 hexadecimal digits, never all 0; `flags` is a byte."""

    trace: str
    span: str
    flags: int

    @property
    def is_sampled(self) -> bool:
        return bool(self.flags & SAMPLED)


def parse_traceparent(text: str) -> TraceParent | None:
    """None where the standard says that there is none. Of later versions it reads what the first one has."""
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
    """What each vendor noted, in its order; nothing where any of it is not as the standard says."""
    if len(text) > MAX_TRACESTATE:
        return []
    found = [_MEMBER.fullmatch(member.strip(" \t")) for member in text.split(",") if member.strip(" \t")]
    pairs = [(match[1], match[2]) for match in found if match is not None]
    is_valid = len(pairs) == len(found) == len({key for key, _ in pairs}) and len(pairs) <= _MAX_MEMBERS
    return pairs if is_valid else []


def known_tracestate(text: str) -> str:
    """What of it is to be kept, without what says nothing."""
    return ",".join(f"{key}={value}" for key, value in parse_tracestate(text))
