"""The root span of one request's trace, made of its record when it has ended; never begins a trace and never sends one.

Names and attributes are those of OpenTelemetry's semantic conventions for generative AI, as they stood in 2026
(status: development); `tandem.*` are our own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

import msgspec

from tandem.core.stages import Stage
from tandem.flow.ledger import LedgerPhase, PhaseLedger
from tandem.gateway.measures import OPERATIONS
from tandem.gateway.record import CANCELLED, FINISHED, AnswerRecord
from tandem.obs.tracing import Attributes, SpanRecord

MAX_REASONS = 4000
"""Bytes; there are some 600 of most requests."""
_STAGES = [f"tandem.stage.{stage.value}_s" for stage in Stage]
_INSIDE = {LedgerPhase.QUEUE: "queue", LedgerPhase.ROUTE: "route"}
"""What of a request happens in the gateway, and takes its time."""


class SpanFacts(NamedTuple):
    """What a span tells beyond a record. `finish_reasons`: by choice."""

    ledger: PhaseLedger
    max_tokens: int
    finish_reasons: Mapping[int, str]


def root_span(record: AnswerRecord, facts: SpanFacts, reasons: Mapping[str, object]) -> SpanRecord:
    """`reasons`: why it was placed as it was, for JSON."""
    operation = OPERATIONS[record.endpoint]
    has_failed = record.outcome not in (FINISHED, CANCELLED)
    return SpanRecord(
        name=f"{operation} {record.model}".rstrip(),
        start=record.came_at,
        end=record.came_at + record.total_s,
        attributes={**_attributes(record, facts), **_placed(record, reasons), **_stages(record)},
        children=tuple(_children(record, facts.ledger)),
        error=(record.error or record.outcome) if has_failed else "",
        kind="server",
    )


def _attributes(record: AnswerRecord, facts: SpanFacts) -> Attributes:
    found: dict[str, str | int | float | bool | tuple[str, ...]] = {
        "gen_ai.operation.name": OPERATIONS[record.endpoint],
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": record.model,
        "gen_ai.request.max_tokens": facts.max_tokens,
        "gen_ai.usage.input_tokens": record.usage.num_prompt,
        "gen_ai.usage.output_tokens": record.usage.num_output,
        "tandem.request": record.id,
        "tandem.label": record.label,
        "tandem.tenant": record.tenant,
        "tandem.lane": record.lane,
        "tandem.attempts": record.num_attempts,
        "tandem.streamed": record.is_streamed,
    }
    if record.usage.num_cached is not None:
        found["gen_ai.usage.cache_read.input_tokens"] = record.usage.num_cached
    if record.outcome != FINISHED:
        found["error.type"] = record.outcome
    if facts.finish_reasons:
        found["gen_ai.response.finish_reasons"] = tuple(reason for _, reason in sorted(facts.finish_reasons.items()))
    return found


def _placed(record: AnswerRecord, reasons: Mapping[str, object]) -> Attributes:
    told: Attributes = {
        "tandem.path": record.path,
        "tandem.reason": record.reason,
        "tandem.workers": record.workers,
        "tandem.reasons": msgspec.json.encode(reasons)[:MAX_REASONS].decode(errors="ignore") if reasons else "",
    }
    return {name: value for name, value in told.items() if value}


def _stages(record: AnswerRecord) -> Attributes:
    """The ledger, in seconds."""
    found = dict(zip(_STAGES, record.stages, strict=True))
    found["tandem.total_s"] = record.total_s
    if record.first_token_s is not None:
        found["tandem.first_token_s"] = record.first_token_s
    return found


def _children(record: AnswerRecord, ledger: PhaseLedger) -> Iterator[SpanRecord]:
    """Each time that it waited for a place, and for the word of those that it was sent to."""
    for (phase, begun), (_, ended) in pairwise(ledger.moves):
        if phase in _INSIDE and ended > begun:
            start, end = (record.came_at + at - ledger.began_at for at in (begun, ended))
            yield SpanRecord(name=_INSIDE[phase], start=start, end=end, attributes={})
