"""Build the gateway's span of one request from its record, after the request has ended.

Names and attributes are those of OpenTelemetry's semantic conventions for generative AI as of 2026 (status:
development); attributes `tandem.*` are our own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from tandem.core.request_stages import Stage
from tandem.gateway.telemetry.request_metrics import OPERATIONS
from tandem.gateway.telemetry.request_record import CANCELLED, FINISHED, RequestRecord
from tandem.obs.tracing.span_attributes import LayeredAttributes, Shared, Value
from tandem.obs.tracing.tracing import Attributes, SpanRecord
from tandem.orchestration.phase_ledger import LedgerPhase, PhaseLedger

MAX_REASONS = 4000
"""Largest size in bytes of `tandem.reasons`; most requests have some 600 bytes of reasons."""
_FIGURES = (*(f"tandem.stage.{stage.value}_s" for stage in Stage), "tandem.total_s")
"""Attribute names of the stages and their sum, in seconds."""
_ALL_FIGURES = (*_FIGURES, "tandem.first_token_s")
_MAX_KEPT = 1024
_alike = attrgetter(
    "endpoint", "model", "tenant", "lane", "outcome", "path", "reason", "workers", "num_attempts", "is_streamed"
)
"""Returns those values of a record that many records have in common."""
_QUEUE, _ROUTE = LedgerPhase.QUEUE, LedgerPhase.ROUTE
_NO_ATTRIBUTES: Attributes = {}


class SpanFacts(NamedTuple):
    """Values of a span that a record lacks. `finish_reasons`: by choice."""

    ledger: PhaseLedger
    max_tokens: int
    finish_reasons: Mapping[int, str]


def root_span(record: RequestRecord, facts: SpanFacts, reasons: Mapping[str, object]) -> SpanRecord:
    """Build the root span of a record, with a child for each wait in the queue or for workers.

    `reasons`: why the router chose the last placement, as values for JSON."""
    has_failed = record.outcome not in (FINISHED, CANCELLED)
    finishes = tuple(reason for _, reason in sorted(facts.finish_reasons.items()))
    first_s = record.first_token_s
    return SpanRecord(
        name=_name(record.endpoint, record.model),
        start=record.received_at,
        end=record.received_at + record.total_s,
        attributes=LayeredAttributes(
            _shared(_alike(record), finishes),
            _own(record, facts, reasons),
            _FIGURES if first_s is None else _ALL_FIGURES,
            (*record.stages, record.total_s) if first_s is None else (*record.stages, record.total_s, first_s),
        ),
        children=tuple(_children(record, facts.ledger)),
        error=(record.error or record.outcome) if has_failed else "",
        kind="server",
    )


def _name(endpoint: str, model: str) -> str:
    return f"{OPERATIONS[endpoint]} {model}".rstrip()


@lru_cache(_MAX_KEPT)
def _shared(alike: tuple[Any, ...], finishes: tuple[str, ...]) -> Shared:
    """Return the attributes that many requests share, as one cached object; those that may be absent are left out when
    they are empty."""
    endpoint, model, tenant, lane, outcome, path, reason, workers, num_attempts, is_streamed = alike
    found: dict[str, Value] = {
        "gen_ai.operation.name": OPERATIONS[endpoint],
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": model,
        "tandem.tenant": tenant,
        "tandem.lane": lane,
        "tandem.attempts": num_attempts,
        "tandem.streamed": is_streamed,
    }
    optional: dict[str, Value] = {
        "error.type": "" if outcome == FINISHED else outcome,
        "gen_ai.response.finish_reasons": finishes,
        "tandem.path": path,
        "tandem.reason": reason,
        "tandem.workers": workers,
    }
    return Shared(found | {name: value for name, value in optional.items() if value})


def _own(record: RequestRecord, facts: SpanFacts, reasons: Mapping[str, object]) -> Attributes:
    usage = record.usage
    found: dict[str, Value] = {
        "gen_ai.request.max_tokens": facts.max_tokens,
        "gen_ai.usage.input_tokens": usage.num_prompt,
        "gen_ai.usage.output_tokens": usage.num_output,
        "tandem.request": record.id,
        "tandem.label": record.label,
    }
    if usage.num_cached is not None:
        found["gen_ai.usage.cache_read.input_tokens"] = usage.num_cached
    if reasons:
        found["tandem.reasons"] = msgspec.json.encode(reasons)[:MAX_REASONS].decode(errors="ignore")
    return found


def _children(record: RequestRecord, ledger: PhaseLedger) -> Iterator[SpanRecord]:
    """Make a span for each wait in the gateway's queue and each wait for the chosen workers to accept the request."""
    began_at = record.received_at - ledger.began_at
    for (phase, begun), (_, ended) in pairwise(ledger.moves):
        # By identity: the hash of an Enum's member is a call.
        name = "queue" if phase is _QUEUE else "route" if phase is _ROUTE else ""
        if name and ended > begun:
            yield SpanRecord(name, began_at + begun, began_at + ended, _NO_ATTRIBUTES)
