"""A scaler under any demand: more demand never takes fewer workers, no number is out of bounds, none leaves that others
could not stand in for, and noise does not make it go up and down."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tandem.core.config import PlannerConfig
from tandem.core.slo import Slo
from tandem.core.step_cost import StepCost
from tandem.scaling.cluster_state import ClusterState, Demand, PoolState, WorkerCapacity
from tandem.scaling.decision import Decision, ReplicaTarget
from tandem.scaling.scaler import Scaler, clamped
from tests.effort import effort

WORKER = WorkerCapacity(
    cost=StepCost(base_s=7e-3, prefill_token_s=24e-6, decode_seq_s=3e-5, decode_context_s=4e-8, prefill_pair_s=9e-10),
    num_blocks=24_000,
    block_size=16,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
)
SLO = Slo(ttft_s=1.0, itl_s=0.04)
POLICY = PlannerConfig(
    min_prefill=2, max_prefill=40, min_decode=1, max_decode=30, scale_down_s=60.0, window_s=60.0, start_s=20.0
)
INTERVAL_S = POLICY.interval_s

rates = st.floats(0.0, 120.0)
QUIET = st.sampled_from([True] * 9 + [False])


@st.composite
def demands(draw: st.DrawFn) -> Demand | None:
    """Of one interval, in any state that gateways may tell; None: they tell nothing."""
    if draw(st.integers(0, 9)) == 0:
        return None
    number = draw(st.integers(0, 600))
    num_input = number * draw(st.integers(1, 8000))
    return Demand(
        seconds=INTERVAL_S,
        num_requests=number,
        num_input_tokens=num_input,
        num_cached_tokens=draw(st.integers(0, num_input)),
        num_output_tokens=number * draw(st.integers(0, 1000)),
        num_prefill_pairs=draw(st.integers(0, 10**10)),
        num_served=draw(st.sampled_from([0, number])),
        num_late_ttft=draw(st.integers(0, number)),
    )


def demand(rate: float, num_input: int = 2000, num_output: int = 200) -> Demand:
    number = round(rate * INTERVAL_S)
    return Demand(
        seconds=INTERVAL_S,
        num_requests=number,
        num_input_tokens=number * num_input,
        num_cached_tokens=0,
        num_output_tokens=number * num_output,
        num_prefill_pairs=number * num_input**2,
        num_served=number,
    )


@dataclass
class Fleet:
    """Carries out what is decided: workers start after `start_s`, and drain for a while before they are gone."""

    prefill: int = 2
    decode: int = 1
    at: float = 0.0
    coming: list[tuple[float, str]] = field(default_factory=list)
    leaving: list[tuple[float, str]] = field(default_factory=list)
    DRAIN_S = 15.0

    def observed(self, what: Demand | None) -> ClusterState:
        self.at += INTERVAL_S
        for at, role in [one for one in self.coming if one[0] <= self.at]:
            self.coming.remove((at, role))
            setattr(self, role, getattr(self, role) + 1)
        self.leaving = [one for one in self.leaving if one[0] > self.at]
        return ClusterState(
            at=self.at, demand=what, prefill=self.state("prefill"), decode=self.state("decode"),
            prefill_worker=WORKER, decode_worker=WORKER,
        )  # fmt: skip

    def state(self, role: str) -> PoolState:
        return PoolState(
            getattr(self, role),
            sum(one == role for _, one in self.coming),
            sum(one == role for _, one in self.leaving),
        )

    def carry_out(self, decision: Decision) -> None:
        for role, target in zip(("prefill", "decode"), decision.target, strict=True):
            more = target - self.state(role).num_kept
            self.coming += [(self.at + POLICY.start_s, role)] * max(0, more)
            while more < 0 and (found := [one for one in self.coming if one[1] == role]):
                self.coming.remove(found[-1])
                more += 1
            if more < 0:
                setattr(self, role, getattr(self, role) + more)
                self.leaving += [(self.at + self.DRAIN_S, role)] * -more

    def driven(self, scaler: Scaler, demand_sequence: list[Demand | None]) -> list[Decision]:
        decisions = []
        for what in demand_sequence:
            decisions.append(scaler.decide(self.observed(what)))
            self.carry_out(decisions[-1])
        return decisions


@effort(20)
@given(st.lists(demands(), min_size=1, max_size=40), st.booleans())
def test_targets_are_in_bounds_and_equal_demands_give_equal_decisions(
    demand_sequence: list[Demand | None], change_roles: bool
) -> None:
    policy = replace(POLICY, change_roles=change_roles)
    decisions = Fleet().driven(Scaler(policy, SLO), demand_sequence)
    for decision in decisions:
        assert 2 <= decision.target.prefill <= 40 and 1 <= decision.target.decode <= 30
        assert decision.reasons and all(reason for reason in decision.reasons)
    assert Fleet().driven(Scaler(policy, SLO), demand_sequence) == decisions


@effort(20)
@given(st.lists(demands(), min_size=1, max_size=40))
def test_no_pool_loses_more_than_a_quarter_at_once_nor_while_others_leave(demand_sequence: list[Demand | None]) -> None:
    scaler, fleet = Scaler(replace(POLICY, change_roles=False), SLO), Fleet(12, 9)
    for what in demand_sequence:
        observed = fleet.observed(what)
        decision = scaler.decide(observed)
        for pool, target in zip((observed.prefill, observed.decode), decision.target, strict=True):
            lost = pool.num_kept - target
            assert lost <= max(1, pool.num_kept // 4)
            assert lost <= 0 or not pool.num_draining
        fleet.carry_out(decision)


@effort(15)
@given(st.lists(demands(), max_size=30), st.integers(2, 40), st.integers(1, 30))
def test_without_a_demand_the_running_workers_are_kept(
    demand_sequence: list[Demand | None], prefill: int, decode: int
) -> None:
    scaler, fleet = Scaler(POLICY, SLO), Fleet(prefill, decode)
    fleet.driven(scaler, demand_sequence)
    observed = fleet.observed(None)
    decision = scaler.decide(observed)
    assert decision.target == (observed.prefill.num_kept, observed.decode.num_kept)
    assert decision.held_back and not decision.changes


@effort(15)
@given(rates, rates, st.integers(1, 8000), st.integers(0, 1000))
def test_more_requests_never_need_fewer_workers(one: float, other: float, num_input: int, num_output: int) -> None:
    few, many = (
        Fleet().driven(Scaler(POLICY, SLO), [demand(rate, num_input, num_output)] * 12)[-1].needed
        for rate in sorted((one, other))
    )
    assert few.prefill <= many.prefill and few.decode <= many.decode


@effort(15)
@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 500), st.integers(1, 500))
def test_longer_requests_never_need_fewer_workers(one: int, other: int, short: int, long: int) -> None:
    (few_in, many_in), (few_out, many_out) = sorted((one, other)), sorted((short, long))
    few = Fleet().driven(Scaler(POLICY, SLO), [demand(20.0, few_in, few_out)] * 12)[-1].needed
    many = Fleet().driven(Scaler(POLICY, SLO), [demand(20.0, many_in, many_out)] * 12)[-1].needed
    assert few.prefill <= many.prefill and few.decode <= many.decode


@effort(10)
@given(st.lists(st.floats(0.7, 1.3), min_size=150, max_size=150), st.floats(5.0, 80.0))
def test_noise_turns_a_fleet_round_no_more_often_than_it_may_shrink(noise: list[float], rate: float) -> None:
    """Each time that it shrinks, fewer workers were enough for `scale_down_s`; so in a time it turns round at most
    twice for each of those that fit into it, whatever comes."""
    demand_sequence: list[Demand | None] = [demand(rate * one) for one in noise]
    decisions = Fleet().driven(Scaler(replace(POLICY, change_roles=False), SLO), demand_sequence)
    most = 2 * (len(noise) * INTERVAL_S / POLICY.scale_down_s) + 1
    for role in (0, 1):
        sizes = [decision.target[role] for decision in decisions]
        steps = [later - earlier for earlier, later in pairwise(sizes) if later != earlier]
        assert sum((step > 0) != (other > 0) for step, other in pairwise(steps)) <= most
        settled = sizes[30:]
        assert max(settled) - min(settled) <= 1 + max(settled) // 3, settled


@effort(10)
@given(st.lists(st.tuples(rates, rates), min_size=1, max_size=40))
def test_a_target_is_never_below_what_is_needed_now_but_for_bounds(demand_sequence: list[tuple[float, float]]) -> None:
    decisions = Fleet().driven(
        Scaler(replace(POLICY, change_roles=False), SLO), [demand(one) for one, _ in demand_sequence]
    )
    for decision in decisions:
        assert decision.target.prefill >= clamped(decision.needed.prefill, POLICY.min_prefill, POLICY.max_prefill)
        assert decision.target.decode >= clamped(decision.needed.decode, POLICY.min_decode, POLICY.max_decode)


def test_the_same_size_for_ever_under_the_same_demand() -> None:
    demand_sequence: list[Demand | None] = [demand(30.0)] * 200
    targets = {decision.target for decision in Fleet().driven(Scaler(POLICY, SLO), demand_sequence)[20:]}
    assert len(targets) == 1 and targets != {ReplicaTarget(2, 1)}


@effort(20)
@given(st.lists(st.tuples(demands(), st.integers(0, 2), QUIET), min_size=20, max_size=40), st.booleans())
def test_a_pool_is_empty_only_after_a_time_without_requests_and_not_while_there_are_some(
    steps: list[tuple[Demand | None, int, bool]], change_roles: bool
) -> None:
    policy = replace(POLICY, min_prefill=0, min_decode=0, idle_s=30.0, change_roles=change_roles)
    scaler, fleet, last_request_at = Scaler(policy, SLO), Fleet(), 0.0
    for what, num_waiting, is_quiet in steps:
        quiet = None if what is None else demand(0.0)
        observed = fleet.observed(quiet if is_quiet else what)
        if not is_quiet:
            observed = replace(observed, num_queued_requests=num_waiting)
        has_arrived = observed.demand is not None and observed.demand.num_requests > 0
        decision = scaler.decide(observed)
        if has_arrived or observed.num_queued_requests:
            last_request_at = observed.at
            assert min(decision.target) >= 1
        for pool, target in zip((observed.prefill, observed.decode), decision.target, strict=True):
            assert target or not pool.num_kept or observed.at - last_request_at >= policy.idle_s
        fleet.carry_out(decision)
