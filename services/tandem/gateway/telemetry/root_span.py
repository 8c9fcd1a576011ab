"""End the gateway's span of one request, with the attributes that its record gives.

Names and attributes are those of OpenTelemetry's semantic conventions for generative AI as of 2026 (status:
development); attributes `tandem.*` are our own.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import msgspec
from opentelemetry.context import Context
from opentelemetry.trace import Span, Tracer, set_span_in_context

from tandem.core.request_stages import Stage
from tandem.gateway.telemetry.request_metrics import OPERATIONS
from tandem.gateway.telemetry.request_record import CANCELLED, FINISHED, RequestRecord
from tandem.obs.tracing import end_span, nanoseconds
from tandem.orchestration.phase_ledger import LedgerPhase, PhaseLedger

MAX_REASONS = 4000
"""Largest size in bytes of `tandem.reasons`; most requests have some 600 bytes of reasons."""
_WAITS = {LedgerPhase.QUEUE: "queue", LedgerPhase.ROUTE: "route"}
"""Names of the child spans, by the phase in which the request waits."""


class SpanFacts(NamedTuple):
    """Describe what a span needs besides the record of its request.

    `ledger`: the times of the prompt that ended last. `max_tokens`: the request's `max_tokens`. `finish_reasons`: why
    each choice finished, by choice index.
    """

    ledger: PhaseLedger
    max_tokens: int
    finish_reasons: Mapping[int, str]


def end_root_span(
    span: Span, tracer: Tracer, record: RequestRecord, facts: SpanFacts, reasons: Mapping[str, object]
) -> None:
    """Set the attributes of a request's root span and end it, with a child span for each period in the queue or between
    submission and acceptance by workers.

    `record`: the record of that request. `reasons`: the router's reasons for the last placement, as values for JSON."""
    span.update_name(f"{OPERATIONS[record.endpoint]} {record.model}".rstrip())
    span.set_attributes(_attributes(record, facts, reasons))
    has_failed = record.outcome not in (FINISHED, CANCELLED)
    end_span(span, record.received_at + record.total_s, (record.error or record.outcome) if has_failed else "")
    context = set_span_in_context(span, Context())
    began_at = record.received_at - facts.ledger.began_at
    for (phase, begun), (_, ended) in pairwise(facts.ledger.moves):
        if phase in _WAITS and ended > begun:
            child = tracer.start_span(_WAITS[phase], context, start_time=nanoseconds(began_at + begun))
            end_span(child, began_at + ended)


def _attributes(
    record: RequestRecord, facts: SpanFacts, reasons: Mapping[str, object]
) -> dict[str, str | int | float | bool | tuple[str, ...]]:
    """Return the attributes of a root span; those that may be absent are left out when they are empty."""
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
        "tandem.preemptions": record.pauses.num,
        "tandem.paused_s": record.pauses.seconds,
        "tandem.yielded_sequences": sum(each.num_sequences for each in record.yields),
        "tandem.yielded_tokens": sum(each.num_tokens for each in record.yields),
        "tandem.yielded_blocks": sum(each.num_blocks for each in record.yields),
        "tandem.streamed": record.is_streamed,
        "tandem.total_s": record.total_s,
    }
    for stage, seconds in zip(Stage, record.stages, strict=True):
        found[f"tandem.stage.{stage.value}_s"] = seconds
    if record.first_token_s is not None:
        found["tandem.first_token_s"] = record.first_token_s
    if record.usage.num_cached is not None:
        found["gen_ai.usage.cache_read.input_tokens"] = record.usage.num_cached
    if reasons:
        found["tandem.reasons"] = msgspec.json.encode(reasons)[:MAX_REASONS].decode(errors="ignore")
    optional: dict[str, str | tuple[str, ...]] = {
        "error.type": "" if record.outcome == FINISHED else record.outcome,
        "gen_ai.response.finish_reasons": tuple(reason for _, reason in sorted(facts.finish_reasons.items())),
        "tandem.path": record.path,
        "tandem.reason": record.reason,
        "tandem.workers": record.workers,
    }
    return found | {name: value for name, value in optional.items() if value}
