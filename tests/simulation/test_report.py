"""Test that a report adds up and that recording does not change a run."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from tandem.core.config import GatewayConfig
from tandem.core.slo import Slo
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.cluster.cluster import SimCluster
from tandem.sim.report.report import LatencyStats, report
from tandem.sim.report.time_series import MAX_POINTS, Series
from tandem.sim.simulate import simulate
from tandem.workload.mix import RequestClass, poisson
from tandem.workload.scheduled_request import ScheduledRequest
from tests.simulation.clusters import cluster, cluster_spec, mix, run, slow_spec, traces_of

TARGETS = Slo(ttft_s=2.0, itl_s=0.08)


def tallied(traces: list[ClientTrace], slo: Slo = TARGETS) -> LatencyStats:
    tally = LatencyStats(slo)
    for trace in traces:
        tally.add(trace)
    return tally


def split() -> SimCluster:
    return cluster((replace(slow_spec("prefill"), price_per_hour=2.0), 1), (slow_spec("decode"), 2))


@pytest.fixture(scope="module")
def ran() -> tuple[SimCluster, list[ScheduledRequest], list[ClientTrace]]:
    """Return a run that has ended, for tests that only read it."""
    one, schedule = split(), mix(seed=2, count=60, rate=0.8)
    return one, schedule, run(one, schedule)


def test_a_report_adds_up(ran: tuple[SimCluster, list[ScheduledRequest], list[ClientTrace]]) -> None:
    one, schedule, traces = ran
    result = report(one, tallied(traces))
    num_output = sum(scheduled.request.sampling.max_tokens for scheduled in schedule)
    num_prompt = sum(len(scheduled.request.prompt_tokens) for scheduled in schedule)
    assert result.errors == {} and result.request_rate * result.wall_s == pytest.approx(60)
    assert result.output_rate * result.wall_s == pytest.approx(num_output)
    assert result.prompt_rate * result.wall_s == pytest.approx(num_prompt) and result.cached_share == 0
    assert result.kv_rate * result.wall_s == pytest.approx(one.fabric.num_bytes)
    # All KV leaves the one prefill worker, so that its link is the busiest, at 1 GB/s.
    assert result.busiest_link_share * result.wall_s == pytest.approx(one.fabric.num_bytes / 1e9)
    assert result.cost_per_million_output == pytest.approx(2.0 * result.wall_s / 3600 / num_output * 1e6)
    assert result.cost_per_million_prompt == pytest.approx(2.0 * result.wall_s / 3600 / num_prompt * 1e6)
    assert result.digest == one.digest and result.num_events == one.num_events
    whole, *parts = result.groups
    assert whole.name == "all" and [part.name for part in parts] == ["long", "medium", "short"]
    assert sum(part.num_requests for part in parts) == whole.num_requests == whole.num_complete == 60
    assert whole.itl is not None and whole.itl.count == num_output - 60
    long, _, short = (part.ttft for part in parts)
    assert long is not None and short is not None and short.p50 < long.p50


def test_pools_add_up(ran: tuple[SimCluster, list[ScheduledRequest], list[ClientTrace]]) -> None:
    one, schedule, traces = ran
    result = report(one, tallied(traces))
    num_prompt = sum(len(scheduled.request.prompt_tokens) for scheduled in schedule)
    num_decoded = sum(scheduled.request.sampling.max_tokens for scheduled in schedule) - 60
    decode, prefill = result.pools
    assert (decode.pool, decode.num_workers, prefill.pool, prefill.num_workers) == ("decode", 2, "prefill", 1)
    assert prefill.prefill_rate * result.wall_s == pytest.approx(num_prompt) and prefill.decode_rate == 0
    # The second token is the first that a decode worker computes; it never sees a prompt.
    assert decode.decode_rate * result.wall_s == pytest.approx(num_decoded) and decode.prefill_rate == 0
    assert decode.worker_rate == pytest.approx(decode.decode_rate / 2)
    assert decode.mean_batch == pytest.approx(num_decoded / sum(w.num_steps for w in one.workers[1:]))
    assert 0 < decode.utilisation < 1 and 0.5 < prefill.utilisation < 1
    assert prefill.num_preempted == decode.num_preempted == 0


def test_goodput_is_what_meets_both_targets_request_by_request(
    ran: tuple[SimCluster, list[ScheduledRequest], list[ClientTrace]],
) -> None:
    one, _, traces = ran
    good = 0
    for trace in traces:
        late = [gap for gap in trace.gaps_s if gap > 0.03]
        good += trace.ttft_s <= 1.0 and len(late) <= 0.05 * len(trace.gaps_s)
    result = report(one, tallied(traces, Slo(ttft_s=1.0, itl_s=0.03)))
    assert 0 < good < 60, "the targets should divide the requests"
    assert result.groups[0].num_good == good and result.good_share == good / 60
    assert result.good_rate * result.wall_s == pytest.approx(good)


def test_prompt_tokens_from_a_prefix_cache_are_reported() -> None:
    one = cluster((slow_spec(), 1))
    (first,) = poisson([RequestClass("g", 1.0, (64, 64), (5, 5))], seed=7, count=1, rate=0.0)
    again = replace(first, request=replace(first.request, id="r1"), due_s=60.0)  # type: ignore[arg-type]
    result = report(one, tallied(run(one, [first, again])))
    # Of 64 tokens the last block is computed again, because a hit never covers a whole prompt.
    assert result.cached_share == pytest.approx(48 / 128)


def test_preemptions_are_counted() -> None:
    tight = replace(slow_spec(), num_blocks=24)
    one = cluster((tight, 1))
    traces = run(one, poisson([RequestClass("g", 1.0, (60, 60), (100, 100))], seed=7, count=4, rate=0.0))
    assert report(one, tallied(traces)).pools[0].num_preempted > 0


def test_failures_are_counted_and_kept_out_of_the_latencies() -> None:
    one = cluster((slow_spec("decode"), 1), gateway=GatewayConfig(disaggregation="strict", queue_timeout_s=2.0))
    traces = traces_of(one, poisson([RequestClass("g", 1.0, (9, 9), (5, 5))], seed=7, count=3, rate=0.0))
    result = report(one, tallied(traces))
    assert result.errors == {"no_worker": 3}
    assert result.groups[0].ttft is None and result.groups[0].num_complete == result.groups[0].num_good == 0
    assert result.cost_per_million_output is None and result.output_rate == 0


def test_a_run_without_requests_has_no_report() -> None:
    with pytest.raises(ValueError, match="have ended"):
        report(cluster((slow_spec(), 1)), LatencyStats(TARGETS))
    with pytest.raises(ValueError, match="have ended"):
        simulate(cluster_spec((slow_spec(), 1)), [], TARGETS)


def test_what_watches_a_run_does_not_change_it() -> None:
    spec = cluster_spec((slow_spec("prefill"), 1), (slow_spec("decode"), 1))
    schedule = mix(seed=3, count=15, rate=1.0)
    plain, _ = simulate(spec, schedule, Slo())
    series = Series()
    seen: list[float] = []
    watched, _ = simulate(spec, schedule, TARGETS, series=series, look=lambda cluster, _: seen.append(cluster.now))
    assert plain.digest == watched.digest
    assert len(seen) == 15 and series.queued


def test_a_series_adds_up_and_stays_small() -> None:
    series, one = Series(width_s=0.01), split()
    schedule = mix(seed=2, count=60, rate=0.8)

    def ended(trace: ClientTrace) -> None:
        series.add(trace)
        series.look(one)

    one.run(schedule, ended)
    windows = series.windows()
    width_s = min(b.begin_s - a.begin_s for a, b in pairwise(windows))
    assert len(windows) <= MAX_POINTS and width_s > 0.01, "windows should have been joined"
    num_output = sum(scheduled.request.sampling.max_tokens for scheduled in schedule)
    assert sum(window.output_rate for window in windows) * width_s == pytest.approx(num_output)
    pools = series.pools()
    assert set(pools) == {"prefill", "decode"}
    busy_s = sum(
        sample.utilisation * (sample.time_s - before) * 2
        for before, sample in zip([0.0, *(s.time_s for s in pools["decode"])], pools["decode"], strict=False)
    )
    assert busy_s == pytest.approx(sum(worker.busy_s for worker in one.workers[1:]), rel=0.05)
