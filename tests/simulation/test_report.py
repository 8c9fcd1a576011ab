"""Workloads are what they say and reports add up; never a time of this machine."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import pytest

from tandem.core.config import GatewayConfig
from tandem.sim.report import report, spread
from tandem.workload.mix import MIX, Group, poisson
from tests.simulation.clusters import cluster, mix, run, slow_spec, traces_of

# ---- workload


def test_the_mix_has_its_shares_lengths_and_rate() -> None:
    asks = mix(seed=1, count=3000, rate=5.0)
    limits = {group.name: group for group in MIX}
    for name, share in (("short", 0.7), ("medium", 0.2), ("long", 0.1)):
        assert sum(ask.group == name for ask in asks) / 3000 == pytest.approx(share, abs=0.03)
    for ask in asks:
        group, request = limits[ask.group], ask.request
        assert group.prompt[0] <= len(request.prompt_tokens) <= group.prompt[1]
        assert 32 <= request.sampling.max_tokens <= 64
    waits = [b.due_s - a.due_s for a, b in pairwise(asks)]
    assert min(waits) >= 0 and fmean(waits) == pytest.approx(1 / 5, rel=0.05)
    # Half of exponential waits are shorter than ln 2 of the mean; of regular ones none would be.
    assert sum(wait < 0.6931 / 5 for wait in waits) / len(waits) == pytest.approx(0.5, abs=0.03)


def test_a_workload_is_a_function_of_its_seed() -> None:
    asks = mix(seed=1, count=20, rate=5.0)
    assert mix(seed=1, count=20, rate=5.0) == asks
    assert mix(seed=1, count=30, rate=5.0)[:20] == asks
    other = mix(seed=2, count=20, rate=5.0)
    assert all(a.request.prompt_tokens[:16] != b.request.prompt_tokens[:16] for a, b in zip(asks, other, strict=True))
    assert len({ask.request.prompt_tokens[:16] for ask in asks}) == 20


def test_at_rate_0_all_come_at_once_and_shares_must_add_up() -> None:
    assert {ask.due_s for ask in mix(seed=1, count=9, rate=0.0)} == {0.0}
    with pytest.raises(ValueError, match="add up to 1"):
        poisson(MIX[:2], seed=1, count=1, rate=1.0)


# ---- report


def test_percentiles_lie_between_the_nearest_ranks() -> None:
    values = spread([4.0, 1.0, 3.0, 2.0])
    assert values is not None
    assert (values.count, values.p50, values.max) == (4, 2.5, 4.0)
    assert values.p95 == pytest.approx(3.85) and values.p999 == pytest.approx(3.997)
    assert spread([]) is None


def test_a_report_adds_up() -> None:
    one = cluster((replace(slow_spec("prefill"), price_per_hour=2.0), 1), (slow_spec("decode"), 2))
    asks = mix(seed=2, count=60, rate=0.8)
    traces = run(one, asks)
    told = report(one, traces)
    num_output = sum(ask.request.sampling.max_tokens for ask in asks)
    num_prompt = sum(len(ask.request.prompt_tokens) for ask in asks)
    assert told.errors == {} and told.request_rate * told.wall_s == pytest.approx(60)
    assert told.output_rate * told.wall_s == pytest.approx(num_output)
    assert told.kv_rate * told.wall_s == pytest.approx(one.num_read_bytes)
    assert told.cost_per_million == pytest.approx(2.0 * told.wall_s / 3600 / num_output * 1e6)
    whole, *parts = told.groups
    assert whole.name == "all" and [part.name for part in parts] == ["long", "medium", "short"]
    assert sum(part.num_requests for part in parts) == whole.num_requests == whole.num_complete == 60
    assert whole.itl is not None and whole.itl.count == num_output - 60
    long, _, short = (part.ttft for part in parts)
    assert long is not None and short is not None and short.p50 < long.p50
    decode, prefill = told.pools
    assert (decode.pool, decode.num_workers, prefill.pool, prefill.num_workers) == ("decode", 2, "prefill", 1)
    assert prefill.prefill_rate * told.wall_s == pytest.approx(num_prompt) and prefill.decode_rate == 0
    # The second token is the first that a decode worker computes; it never sees a prompt.
    assert decode.decode_rate * told.wall_s == pytest.approx(num_output - 60) and decode.prefill_rate == 0
    assert 0 < decode.utilisation < 1 and 0.5 < prefill.utilisation < 1


def test_failures_are_counted_and_kept_out_of_the_latencies() -> None:
    one = cluster((slow_spec("decode"), 1), gateway=GatewayConfig(disaggregation="strict", queue_timeout_s=2.0))
    traces = traces_of(one, poisson([Group("g", 1.0, (9, 9), (5, 5))], seed=7, count=3, rate=0.0))
    told = report(one, traces)
    assert told.errors == {"no_worker": 3}
    assert told.groups[0].ttft is None and told.groups[0].num_complete == 0
    assert told.cost_per_million is None and told.output_rate == 0


def test_a_run_that_has_not_ended_has_no_report() -> None:
    with pytest.raises(ValueError, match="all ended"):
        report(cluster((slow_spec(), 1)), [])
