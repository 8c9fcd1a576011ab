"""Test metrics under vLLM's names: by model, and each from gateways or from workers only."""

from __future__ import annotations

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics

from tandem.obs.metrics import instruments as on
from tandem.obs.metrics.instrument import Kind
from tandem.obs.metrics.metrics import HistogramSnapshot, MetricFamily, Metrics
from tandem.obs.metrics.prometheus import PrometheusCollector
from tandem.obs.metrics.vllm_metrics import ALIASES, vllm_aliases


def aliases(metrics: Metrics) -> dict[str, MetricFamily]:
    return {each.instrument.name: each for each in vllm_aliases(metrics.collect())}


def a_worker() -> Metrics:
    metrics = Metrics()
    metrics.watch(on.WORKER_INFO, lambda: {("w-1", "decode", "llama", "shm"): 1})
    metrics.watch(on.SEQUENCES, lambda: {("running",): 3, ("waiting",): 2, ("reading",): 9})
    metrics.watch(on.KV_UNUSED, lambda: {(): 0.75})
    metrics.watch(on.KV_INFO, lambda: {("16", "2048"): 1})
    metrics.counter(on.GENERATED_TOKENS).add(70)
    return metrics


def a_gateway() -> Metrics:
    metrics = Metrics()
    lasted = metrics.histogram(on.REQUEST_DURATION)
    for model, tenant, error in (("a", "x", ""), ("a", "y", ""), ("a", "y", "cancelled"), ("b", "x", "")):
        lasted.of("chat", model, tenant, "interactive", error).record(0.003)
    stages = metrics.histogram(on.STAGE_DURATION)
    for stage, spent in (("queue", 0.5), ("prefill", 0.25), ("decode", 4.0), ("deliver", 9.0)):
        stages.of(stage, "batch", "a").record(spent)
    usage = metrics.histogram(on.TOKEN_USAGE)
    usage.of("chat", "a", "x", "batch", "input").record(12)
    usage.of("chat", "a", "x", "batch", "output").record(34)
    return metrics


def test_a_workers_figures_are_of_the_model_that_it_serves() -> None:
    exposed = {name: dict(each.points) for name, each in aliases(a_worker()).items()}
    assert exposed == {
        "vllm:num_requests_running": {("llama",): 3},
        "vllm:num_requests_waiting": {("llama",): 2},
        "vllm:kv_cache_usage_perc": {("llama",): 0.25},
        "vllm:cache_config_info": {("llama", "16", "2048"): 1},
        "vllm:generation_tokens": {("llama",): 70},
    }


def test_a_gateways_figures_are_added_up_by_model() -> None:
    exposed = aliases(a_gateway())
    assert exposed["vllm:request_success"].points == {("a",): 2, ("b",): 1}
    latency = exposed["vllm:e2e_request_latency_seconds"].points["a",]
    assert isinstance(latency, HistogramSnapshot) and latency.count == 3 and latency.sum == pytest.approx(0.009)
    for name, value in (
        ("request_queue_time_seconds", 0.5),
        ("request_prefill_time_seconds", 0.25),
        ("request_decode_time_seconds", 4.0),
        ("request_prompt_tokens", 12.0),
        ("request_generation_tokens", 34.0),
    ):
        (point,) = exposed[f"vllm:{name}"].points.values()
        assert isinstance(point, HistogramSnapshot) and (point.count, point.sum) == (1, value), name


def test_the_last_exemplar_of_a_bucket_is_kept() -> None:
    metrics = Metrics()
    gaps = metrics.histogram(on.INTER_TOKEN_LATENCY)
    gaps.of("batch", "a").record_traced(0.0011, "aa", 9.0)
    gaps.of("interactive", "a").record_traced(0.0012, "bb", 5.0)
    gaps.of("interactive", "a").record_traced(9.0, "cc", 5.0)
    (point,) = aliases(metrics)["vllm:inter_token_latency_seconds"].points.values()
    assert isinstance(point, HistogramSnapshot)
    assert [each.trace for _, each in sorted(point.exemplars.items())] == ["aa", "cc"]


def test_they_are_written_in_both_formats() -> None:
    for metrics in (a_worker(), a_gateway()):
        found = {each.name: each.kind for each in (family.instrument for family in vllm_aliases(metrics.collect()))}
        _, openmetrics = PrometheusCollector(metrics).exposition("application/openmetrics-text")
        read = {family.name for family in read_openmetrics(openmetrics.decode()) if family.name.startswith("vllm:")}
        assert read == found.keys()
        text = PrometheusCollector(metrics).exposition("")[1].decode()
        for name, kind in found.items():
            assert f"# TYPE {name}{'_total' if kind is Kind.COUNTER else ''} {kind.value}\n" in text
    assert 'vllm:request_success_total{model_name="a"} 2.0\n' in text
    text = PrometheusCollector(a_worker()).exposition("")[1].decode()
    assert 'vllm:cache_config_info{block_size="16",model_name="llama",num_gpu_blocks="2048"} 1.0\n' in text


def test_the_table_is_in_order() -> None:
    assert len({alias.name for alias in ALIASES}) == len(ALIASES)
    for alias in ALIASES:
        assert alias.where.keys() | set(alias.labels.values()) <= set(alias.source.attributes), alias
        assert alias.name.endswith("_seconds") == (
            alias.instrument.kind is Kind.HISTOGRAM and alias.source.unit == "s"
        ), alias
    assert len({alias.source for alias in ALIASES}) > 10
