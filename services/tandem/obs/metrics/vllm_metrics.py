"""Export those metrics that vLLM has too a second time, under vLLM's names, for autoscalers and ready-made dashboards.

OpenTelemetry allows no colon in a name, so these names exist in Prometheus only. No name is exported by both gateways
and workers, so that sums over a cluster are right. Names and meanings are those of vLLM 0.32
(https://docs.vllm.ai/en/stable/usage/metrics.html), where Tandem has the value. There is no
`vllm:request_inference_time_seconds`: a request that is split has no such period.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tandem.core.request_stages import Stage
from tandem.obs.metrics import instruments as on
from tandem.obs.metrics.instrument import Instrument, Kind
from tandem.obs.metrics.metrics import HistogramSnapshot, MetricFamily, Values, total

_INFO_MODEL = on.WORKER_INFO.attributes.index("model")


@dataclass(frozen=True, slots=True)
class Alias:
    """Define a metric under vLLM's name (`name`, without the prefix `vllm:`) that is computed from Tandem's metric
    `source`.

    `where`: attribute values; only series of `source` that have them count. `labels`: for each of vLLM's labels besides
    `model_name`, the attribute of `source` that gives its value. `is_complement`: whether the value is 1 minus that of
    `source`, which is a ratio. `is_counted`: whether the metric is a counter of the number of values in the histogram
    `source`."""

    name: str
    source: Instrument
    where: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    is_complement: bool = False
    is_counted: bool = False

    @property
    def instrument(self) -> Instrument:
        """Return the alias as a metric with the attribute `model_name` and those of `labels`."""
        name = f"vllm:{self.name}"
        kind = Kind.COUNTER if self.is_counted else self.source.kind
        unit = "s" if name.endswith("_seconds") else ""
        selection = "".join(f" where {attribute} is {value!r}" for attribute, value in self.where.items())
        value = "1 minus " if self.is_complement else "the number of values of " if self.is_counted else ""
        description = f"Repeats {value}{self.source.name}{selection} under vLLM's name."
        return Instrument(name, kind, unit, description, ("model_name", *self.labels), self.source.bounds)


ALIASES = (
    # workers
    Alias("num_requests_running", on.SEQUENCES, {"state": "running"}),
    Alias("num_requests_waiting", on.SEQUENCES, {"state": "waiting"}),
    Alias("kv_cache_usage_perc", on.KV_UNUSED, is_complement=True),
    Alias("cache_config_info", on.KV_INFO, labels={"block_size": "block_size", "num_gpu_blocks": "num_blocks"}),
    Alias("num_preemptions", on.PREEMPTIONS),
    Alias("prompt_tokens", on.STEP_PREFILL_TOKENS),
    Alias("generation_tokens", on.GENERATED_TOKENS),
    Alias("prefix_cache_queries", on.PREFIX_QUERIED_TOKENS),
    Alias("prefix_cache_hits", on.PREFIX_HIT_TOKENS),
    # gateways
    Alias("time_to_first_token_seconds", on.TIME_TO_FIRST_TOKEN),
    Alias("inter_token_latency_seconds", on.INTER_TOKEN_LATENCY),
    Alias("request_time_per_output_token_seconds", on.TIME_PER_OUTPUT_TOKEN),
    Alias("e2e_request_latency_seconds", on.REQUEST_DURATION),
    Alias("request_queue_time_seconds", on.STAGE_DURATION, {"stage": Stage.QUEUE.value}),
    Alias("request_prefill_time_seconds", on.STAGE_DURATION, {"stage": Stage.PREFILL.value}),
    Alias("request_decode_time_seconds", on.STAGE_DURATION, {"stage": Stage.DECODE.value}),
    Alias("request_prompt_tokens", on.TOKEN_USAGE, {"gen_ai.token.type": "input"}),
    Alias("request_generation_tokens", on.TOKEN_USAGE, {"gen_ai.token.type": "output"}),
    Alias("request_success", on.REQUEST_DURATION, {"error.type": ""}, is_counted=True),
)


def vllm_aliases(families: Sequence[MetricFamily]) -> list[MetricFamily]:
    """Compute the metrics under vLLM's names from the collected `families`, and return those whose source is among
    them.

    Each alias has one series per model and combination of its `labels`. The model is that of the source's series, or,
    where these name none, the model that this worker serves.
    """
    by_name = {family.instrument.name: family for family in families}
    info = by_name.get(on.WORKER_INFO.name)
    served = next((values[_INFO_MODEL] for values in info.points), "") if info is not None else ""
    return [
        MetricFamily(alias.instrument, points)
        for alias in ALIASES
        if alias.source.name in by_name and (points := _points(alias, by_name[alias.source.name], served))
    ]


def _points(alias: Alias, family: MetricFamily, served: str) -> dict[Values, float | HistogramSnapshot]:
    attributes = alias.source.attributes
    points: dict[Values, list[float | HistogramSnapshot]] = {}
    for values, point in family.points.items():
        named = dict(zip(attributes, values, strict=True))
        if named.items() >= alias.where.items():
            labels = (named.get(on.MODEL, served), *(named[attribute] for attribute in alias.labels.values()))
            points.setdefault(labels, []).append(point)
    return {labels: _merged(alias, found) for labels, found in points.items()}


def _merged(alias: Alias, points: Sequence[float | HistogramSnapshot]) -> float | HistogramSnapshot:
    snapshots = [point for point in points if isinstance(point, HistogramSnapshot)]
    if snapshots and not alias.is_counted:
        return _sum(snapshots)
    return 1 - total(points) if alias.is_complement else total(points)


def _sum(snapshots: Sequence[HistogramSnapshot]) -> HistogramSnapshot:
    """Sum up histograms; of several exemplars of a bucket the last is kept."""
    counts = tuple(map(sum, zip(*(snapshot.counts for snapshot in snapshots), strict=True)))
    exemplars = sorted(
        (item for snapshot in snapshots for item in snapshot.exemplars.items()), key=lambda item: item[1].at
    )
    return HistogramSnapshot(counts, sum(snapshot.sum for snapshot in snapshots), dict(exemplars))
