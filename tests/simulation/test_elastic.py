"""Simulated clusters whose workers come and go: every request ends well, nothing is left, and what is paid for is what
was there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from tandem.core.config import GatewayConfig, PlannerConfig
from tandem.core.events import Finished
from tandem.core.ids import RequestId
from tandem.core.slo import Slo
from tandem.scaling.cluster_state import ClusterState
from tandem.scaling.decision import ReplicaTarget
from tandem.scaling.scaler import Scaler
from tandem.sim.cluster.client_trace import ClientTrace
from tandem.sim.scaling.autoscale import Autoscaler, ElasticRun, ElasticSpec, ScalerAdapter, simulate_elastic
from tandem.sim.scaling.queue_scaler import QueuePolicy, QueueScaler
from tandem.sim.simulate import simulate
from tandem.workload.scheduled_request import ScheduledRequest
from tests.simulation.clusters import cluster, cluster_spec, prompt, scheduled, slow_spec
from tests.simulation.clusters import run as run_all

SLO = Slo(ttft_s=1.0, itl_s=0.1)
START_S = 4.0


class Scripted:
    """An `Autoscaler` with scripted targets, of which the last stays; records its observations."""

    def __init__(self, *targets: tuple[int, int]) -> None:
        self._targets = targets
        self.seen: list[tuple[ClusterState, ReplicaTarget]] = []

    def target(self, observed: ClusterState, ongoing: ReplicaTarget) -> ReplicaTarget:
        self.seen.append((observed, ongoing))
        return ReplicaTarget(*self._targets[min(len(self.seen), len(self._targets)) - 1])


def elastic_run(
    scaler: Autoscaler,
    schedule: Sequence[ScheduledRequest],
    begins: tuple[int, int] = (1, 1),
    gateway: GatewayConfig | None = None,
    interval_s: float = 1.0,
    ended: Callable[[ClientTrace], None] | None = None,
    price_per_hour: float = 0.0,
) -> ElasticRun:
    kinds = (
        slow_spec("prefill", price_per_hour=price_per_hour),
        slow_spec("decode", price_per_hour=price_per_hour),
    )
    elastic = ElasticSpec(
        kinds={"prefill": kinds[0], "decode": kinds[1]},
        degrees={"prefill": 2, "decode": 1},
        interval_s=interval_s,
        start_s=START_S,
    )
    spec = replace(cluster_spec(*zip(kinds, begins, strict=True)), gateway=gateway or GatewayConfig())
    return simulate_elastic(spec, elastic, scaler, schedule, SLO, ended)


def waves(*rates: float, lasts_s: float = 20.0) -> list[ScheduledRequest]:
    """One after another, at these rates: short prompts and answers."""
    schedule: list[ScheduledRequest] = []
    for index, rate in enumerate(rates):
        for i in range(round(rate * lasts_s)):
            number = len(schedule)
            tokens = (1000 + number,) * (60 + 40 * (i % 3))
            schedule.append(scheduled(number, index * lasts_s + i / rate, tokens, 10 + 10 * (i % 2)))
    return schedule


def test_a_script_is_carried_out_and_paid_for() -> None:
    """Two workers begin, one is ordered at 1 s and one at 2 s, of which the second is called off at 3 s; at 8 s the
    first that was ordered leaves again."""
    script = Scripted((2, 1), (3, 1), *[(2, 1)] * 5, (1, 1))
    run = elastic_run(script, waves(3.0))
    assert run.report.num_requests == 60 and not run.report.errors
    serving = [(moment.at_s, *moment.serving) for moment in run.moments]
    assert serving[:7] == [(t, 1, 1) for t in (1.0, 2.0, 3.0)] + [(t, 2, 1) for t in (4.0, 5.0, 6.0, 7.0)]
    assert serving[7] == (8.0, 2, 1) and serving[9][1] == 1
    observed = [observed for observed, _ in script.seen]
    assert [one.prefill.num_starting for one in observed[:6]] == [0, 1, 2, 0, 0, 0]
    lasts_s = run.tally.ended_s
    least, most = (3 * lasts_s + 2 * second for second in (1.0 + 7.0, 1.0 + 7.0 + 3.0))
    assert least <= run.gpu_hours * 3600 <= most


def test_workers_that_have_left_count_in_the_report() -> None:
    """Three of four prefill workers leave in the middle of the run."""
    run = elastic_run(Scripted(*[(4, 1)] * 10, (1, 1)), waves(4.0), (4, 1), price_per_hour=2.0)
    report, everyone = run.report, run.tally.all()
    assert not report.errors and run.moments[-1].serving == (1, 1)
    num_computed = sum(pool.prefill_rate for pool in report.pools) * report.wall_s
    assert num_computed == pytest.approx(everyone.num_prompt - everyone.num_cached)
    _, prefill = report.pools
    assert prefill.num_workers == 4 and 2.0 < prefill.prefill_rate / prefill.worker_rate < 4.0
    # A prefill worker has two accelerators and costs as much as a decode worker.
    num_paid = (run.gpu_hours * 3600 / run.tally.ended_s - 1) / 2 + 1
    assert report.price_per_hour == pytest.approx(2.0 * num_paid)


def test_workers_that_left_before_the_first_request_are_not_in_the_price() -> None:
    late = [scheduled(number, 50.0 + number, prompt(number, 100), 10) for number in range(8)]
    run = elastic_run(Scripted(*[(4, 1)] * 10, (1, 1)), late, (4, 1), price_per_hour=2.0)
    assert run.moments[-1].serving == (1, 1) and run.report.price_per_hour == pytest.approx(2.0 * 2)


def test_without_changes_a_run_is_as_without_an_autoscaler() -> None:
    schedule = waves(4.0, lasts_s=8.0)
    spec = cluster_spec((slow_spec("prefill"), 1), (slow_spec("decode"), 2))
    plain, tally = simulate(spec, schedule, SLO)
    run = elastic_run(Scripted((1, 2)), schedule, (1, 2))
    assert run.report.digest == plain.digest
    assert run.gpu_hours == pytest.approx((2 + 2 * 1) * tally.ended_s / 3600)


def test_those_who_leave_lose_no_request() -> None:
    """Half of the workers leave at the same time in mid-flight, again and again."""
    sizes = [(4, 4)] * 6 + [(2, 2)] * 3
    run = elastic_run(Scripted(*sizes * 6), waves(10.0), (4, 4))
    assert run.report.num_requests == 200 and not run.report.errors
    assert min(moment.serving for moment in run.moments[:20]) < (4, 4)


def test_equal_runs_have_equal_digests() -> None:
    first, second = (elastic_run(Scripted((3, 2)), waves(4.0, lasts_s=8.0)) for _ in range(2))
    other = elastic_run(Scripted((1, 1)), waves(4.0, lasts_s=8.0))
    assert first.report.digest == second.report.digest != other.report.digest


def test_what_an_autoscaler_is_shown_adds_up() -> None:
    script, schedule = Scripted((1, 1)), waves(4.0)
    run = elastic_run(script, schedule)
    demands = [observed.demand for observed, _ in script.seen]
    assert all(demand is not None and demand.seconds == 1.0 for demand in demands)
    whole = sum(demand.num_requests for demand in demands if demand is not None)
    ended = sum(demand.num_served for demand in demands if demand is not None)
    output = sum(demand.num_output_tokens for demand in demands if demand is not None)
    everyone = run.report.groups[0]
    assert whole == len(schedule) and ended <= whole and 0 < output <= everyone.num_output
    assert all(observed.prefill_worker is not None for observed, _ in script.seen)
    assert any(ongoing.decode > 0 for _, ongoing in script.seen)


def planned() -> ScalerAdapter:
    policy = PlannerConfig(interval_s=1.0, window_s=20.0, start_s=START_S, scale_down_s=15.0, change_roles=False)
    return ScalerAdapter(Scaler(policy, SLO))


def test_a_planner_follows_the_load_up_and_down() -> None:
    scaler = planned()
    run = elastic_run(scaler, waves(1.0, 8.0, 1.0, 1.0))
    assert not run.report.errors
    sizes = [moment.target.prefill + moment.target.decode for moment in run.moments]
    quiet, busy, after = max(sizes[:18]), max(sizes[20:40]), sizes[-1]
    assert quiet < busy > after
    assert all(decision.forecast is not None for decision in scaler.decisions)


def test_a_queue_scaler_follows_the_requests_at_each_worker() -> None:
    policy = QueuePolicy(ongoing_per_worker=(2.0, 4.0), up_s=3.0, down_s=10.0, look_back_s=5.0)
    run = elastic_run(QueueScaler(policy), waves(1.0, 10.0, 1.0, 1.0))
    assert not run.report.errors
    decodes = [moment.target.decode for moment in run.moments]
    assert decodes[15] < max(decodes) > decodes[-1]


SLEEPS = PlannerConfig(
    interval_s=5.0, window_s=20.0, start_s=START_S, scale_down_s=15.0, min_prefill=0, min_decode=0, idle_s=10.0
)


def test_pools_sleep_between_two_waves_and_the_first_request_of_the_second_wakes_them() -> None:
    first = waves(2.0, lasts_s=5.0)
    second = [
        replace(one, due_s=one.due_s + 60.0, request=replace(one.request, id=RequestId(f"s{index}")))
        for index, one in enumerate(first)
    ]
    traces: dict[str, ClientTrace] = {}
    scaler, holds = ScalerAdapter(Scaler(SLEEPS, SLO)), GatewayConfig(wake_timeout_s=30.0, no_worker_wait_s=1.0)
    run = elastic_run(
        scaler, [*first, *second], gateway=holds, interval_s=5.0, ended=lambda trace: traces.update({trace.id: trace})
    )
    assert run.report.num_requests == 20 and not run.report.errors
    sizes = {moment.at_s: moment.serving for moment in run.moments}
    assert sizes[10.0] == (1, 1) and sizes[30.0] == sizes[59.0] == (0, 0)
    woken = next(moment for moment in run.moments if moment.at_s > 60.0)
    assert woken.at_s <= 61.0 and woken.target >= (1, 1), "a decision follows within a second"
    assert START_S - 1.0 < traces["s0"].ttft_s < START_S + 2.0
    assert traces["r9"].path == "remote" and traces["s0"].path.endswith(";held")
    assert run.gpu_hours * 3600 < 3 * 45.0, "of 65 s and more"

    without = elastic_run(
        ScalerAdapter(Scaler(SLEEPS, SLO)), [*first, *second], gateway=replace(holds, wake_timeout_s=0.0)
    )
    assert without.report.errors["no_worker"] > 0


def test_workers_that_have_left_do_not_hide_one_that_holds_the_prompt() -> None:
    """The workers that computed a prompt first all leave. Of their successors one holds it, and decodes, so that it is
    not among the least loaded ones."""
    kind, tokens = slow_spec(), prompt(1, 1600)
    one = cluster((kind, 20), gateway=GatewayConfig(disaggregation="off", remote_prefix=False))
    old = list(one.workers)

    def replace_all() -> None:
        for worker in old:
            one.start(kind)
            one.drain(worker, 60.0, lambda: None)

    one.after(20.0, replace_all)
    same = [scheduled(number, 0.0, tokens) for number in range(20)]
    traces = run_all(one, [*same, scheduled(20, 30.0, tokens, 400), scheduled(21, 40.0, tokens)])
    long, last = (trace.outcome for trace in traces[20:])
    assert isinstance(long, Finished) and isinstance(last, Finished)
    assert (long.num_cached_tokens, last.num_cached_tokens) == (0, 1584)
