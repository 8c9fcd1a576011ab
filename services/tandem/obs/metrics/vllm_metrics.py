"""Export some metrics also under vLLM's names for them.

Autoscalers and ready-made dashboards use these names. OpenTelemetry allows no colon in a name, so they exist in
Prometheus only. No name is exported by gateways and by workers: sums over a cluster stay right. Names and meanings are
those of vLLM 0.32 (https://docs.vllm.ai/en/stable/usage/metrics.html), where Tandem has the value. There is no
`vllm:request_inference_time_seconds`: a request that is split has no such period."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tandem.core.request_stages import Stage
from tandem.obs.metrics import instruments as on
from tandem.obs.metrics.instrument import Instrument, Kind
from tandem.obs.metrics.metrics import HistogramSnapshot, MetricFamily, Values, total

_MODEL = "gen_ai.request.model"
_INFO_MODEL = on.WORKER_INFO.attributes.index("model")


@dataclass(frozen=True, slots=True)
class Alias:
    """vLLM's name for a metric.

    `where` selects the series of `source` with these attribute values. `is_complement` exports 1 minus a ratio. A
    histogram under a counter's name is exported as its number of values."""

    name: str
    kind: Kind
    source: Instrument
    where: Mapping[str, str] = field(default_factory=dict)
    is_complement: bool = False


def _gauge(name: str, source: Instrument, *, is_complement: bool = False, **where: str) -> Alias:
    return Alias(f"vllm:{name}", Kind.GAUGE, source, where, is_complement)


def _counter(name: str, source: Instrument, where: Mapping[str, str] | None = None) -> Alias:
    return Alias(f"vllm:{name}", Kind.COUNTER, source, where or {})


def _histogram(name: str, source: Instrument, where: Mapping[str, str] | None = None) -> Alias:
    return Alias(f"vllm:{name}", Kind.HISTOGRAM, source, where or {})


ALIASES = (
    # workers
    _gauge("num_requests_running", on.SEQUENCES, state="running"),
    _gauge("num_requests_waiting", on.SEQUENCES, state="waiting"),
    _gauge("kv_cache_usage_perc", on.KV_UNUSED, is_complement=True),
    _counter("num_preemptions", on.PREEMPTIONS),
    _counter("prompt_tokens", on.STEP_PREFILL_TOKENS),
    _counter("generation_tokens", on.GENERATED_TOKENS),
    _counter("prefix_cache_queries", on.PREFIX_QUERIED_TOKENS),
    _counter("prefix_cache_hits", on.PREFIX_HIT_TOKENS),
    # gateways
    _histogram("time_to_first_token_seconds", on.TIME_TO_FIRST_TOKEN),
    _histogram("inter_token_latency_seconds", on.INTER_TOKEN_LATENCY),
    _histogram("request_time_per_output_token_seconds", on.TIME_PER_OUTPUT_TOKEN),
    _histogram("e2e_request_latency_seconds", on.REQUEST_DURATION),
    _histogram("request_queue_time_seconds", on.STAGE_DURATION, {"stage": Stage.QUEUE.value}),
    _histogram("request_prefill_time_seconds", on.STAGE_DURATION, {"stage": Stage.PREFILL.value}),
    _histogram("request_decode_time_seconds", on.STAGE_DURATION, {"stage": Stage.DECODE.value}),
    _histogram("request_prompt_tokens", on.TOKEN_USAGE, {"gen_ai.token.type": "input"}),
    _histogram("request_generation_tokens", on.TOKEN_USAGE, {"gen_ai.token.type": "output"}),
    _counter("request_success", on.REQUEST_DURATION, {"error.type": ""}),
)


def vllm_aliases(families: Sequence[MetricFamily]) -> list[MetricFamily]:
    """Return the aliased families by model: the request's model, else the worker's."""
    by_name = {family.instrument.name: family for family in families}
    info = by_name.get(on.WORKER_INFO.name)
    served = next((values[_INFO_MODEL] for values in info.points), "") if info is not None else ""
    return [
        MetricFamily(_instrument(alias), points)
        for alias in ALIASES
        if alias.source.name in by_name and (points := _points(alias, by_name[alias.source.name], served))
    ]


def _instrument(alias: Alias) -> Instrument:
    unit = "s" if alias.name.endswith("_seconds") else ""
    selection = "".join(f", {name} {value!r}" for name, value in alias.where.items())
    description = f"vLLM's name for {alias.source.name}{selection}."
    return Instrument(alias.name, alias.kind, unit, description, ("model_name",), alias.source.bounds)


def _points(alias: Alias, family: MetricFamily, served: str) -> dict[Values, float | HistogramSnapshot]:
    attributes = alias.source.attributes
    points: dict[str, list[float | HistogramSnapshot]] = {}
    for values, point in family.points.items():
        labels = dict(zip(attributes, values, strict=True))
        if labels.items() >= alias.where.items():
            points.setdefault(labels.get(_MODEL, served), []).append(point)
    return {(model,): _merged(alias, found) for model, found in points.items()}


def _merged(alias: Alias, points: Sequence[float | HistogramSnapshot]) -> float | HistogramSnapshot:
    snapshots = [point for point in points if isinstance(point, HistogramSnapshot)]
    if snapshots and alias.kind is Kind.HISTOGRAM:
        return _sum(snapshots)
    return 1 - total(points) if alias.is_complement else total(points)


def _sum(snapshots: Sequence[HistogramSnapshot]) -> HistogramSnapshot:
    """Sum up histograms; of several exemplars of a bucket the last is kept."""
    counts = tuple(map(sum, zip(*(snapshot.counts for snapshot in snapshots), strict=True)))
    exemplars = sorted(
        (item for snapshot in snapshots for item in snapshot.exemplars.items()), key=lambda item: item[1].at
    )
    return HistogramSnapshot(counts, sum(snapshot.sum for snapshot in snapshots), dict(exemplars))
