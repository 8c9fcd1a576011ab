"""Reports add up; never a time of this machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.core.config import GatewayConfig
from tandem.sim.report import report, spread
from tandem.workload.mix import Group, poisson
from tests.simulation.clusters import cluster, mix, run, slow_spec, traces_of


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
