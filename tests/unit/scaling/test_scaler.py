"""Test a sequence of scaling decisions."""

from __future__ import annotations

from dataclasses import replace

from tandem.core.config import PlannerConfig
from tandem.core.slo import Slo
from tandem.core.step_cost import StepCost
from tandem.scaling.cluster_state import ClusterState, Demand, PoolState, WorkerCapacity
from tandem.scaling.decision import Decision, ReplicaTarget
from tandem.scaling.scaler import Scaler, pause_s

POLICY = PlannerConfig()
SLO = Slo(ttft_s=2.0, itl_s=0.05)
WORKER = WorkerCapacity(
    cost=StepCost(
        base_s=7e-3, prefill_token_s=24e-6, decode_seq_s=3e-5, decode_context_s=4e-8, prefill_pair_s=9e-10
    ),
    num_blocks=24_000, block_size=16, max_num_seqs=256, max_num_batched_tokens=8192,
)  # fmt: skip


def demand(rate: float, *, num_input: int = 2000, num_output: int = 200, seconds: float = 5.0) -> Demand:
    number = round(rate * seconds)
    return Demand(
        seconds=seconds, num_requests=number, num_input_tokens=number * num_input, num_cached_tokens=0,
        num_output_tokens=number * num_output, num_prefill_pairs=number * num_input * num_input // 2,
    )  # fmt: skip


def state(at: float, what: Demand | None, size: ReplicaTarget) -> ClusterState:
    return ClusterState(
        at=at, demand=what, prefill=PoolState(size.prefill), decode=PoolState(size.decode),
        prefill_worker=WORKER, decode_worker=WORKER,
    )  # fmt: skip


def decide_each(scaler: Scaler, rates: list[float], size: ReplicaTarget, begin: float = 0.0) -> list[Decision]:
    """Return one decision for each rate, each carried out at once."""
    out: list[Decision] = []
    for i, rate in enumerate(rates, start=1):
        out.append(scaler.decide(state(begin + 5.0 * i, demand(rate), size)))
        size = out[-1].target
    return out


def test_grows_at_once_and_shrinks_only_after_a_while() -> None:
    scaler = Scaler(POLICY, SLO)
    busy = decide_each(scaler, [2.0] * 20 + [80.0] * 20, ReplicaTarget(1, 1))
    assert busy[20].target > busy[19].target
    quiet = decide_each(scaler, [2.0] * 300, busy[-1].target, begin=200.0)
    assert all(decision.target == busy[-1].target for decision in quiet[:40])
    assert quiet[-1].target == busy[19].target


def test_holds_the_workers_while_no_gateway_reports() -> None:
    scaler = Scaler(POLICY, SLO)
    before = decide_each(scaler, [80.0] * 10, ReplicaTarget(1, 1))[-1].target
    decision = scaler.decide(state(60.0, None, before))
    assert decision.target == before and decision.held_back
    nobody = replace(state(5.0, demand(80.0), ReplicaTarget(3, 3)), prefill_worker=None, decode_worker=None)
    decision = Scaler(POLICY, SLO).decide(nobody)
    assert decision.target == (3, 3) and "worker" in decision.held_back


def test_an_observation_that_is_not_newer_changes_nothing() -> None:
    scaler = Scaler(POLICY, SLO)
    decide_each(scaler, [20.0] * 10, ReplicaTarget(4, 2))
    decision = scaler.decide(state(50.0, demand(500.0), ReplicaTarget(4, 2)))
    assert decision.target == (4, 2) and "newer" in decision.held_back


def test_reasons_contain_numbers_and_changes() -> None:
    decision = decide_each(Scaler(POLICY, SLO), [60.0] * 3, ReplicaTarget(1, 1))[0]
    text = " ".join(decision.reasons)
    assert "60.00 requests/s" in text and f"prefill grows from 1 to {decision.target.prefill}" in text


def test_mixed_workers_count_on_both_sides() -> None:
    alone = decide_each(Scaler(POLICY, SLO), [60.0] * 5, ReplicaTarget(1, 1))[-1]
    helped = Scaler(POLICY, SLO).decide(replace(state(5.0, demand(60.0), ReplicaTarget(1, 1)), mixed=PoolState(4)))
    assert sum(helped.needed) == sum(alone.needed)
    assert sum(helped.target) == sum(alone.target) - 4


def test_spare_workers_change_to_the_other_role() -> None:
    """Long prompts end; before their workers have ended, long outputs begin."""
    prompts, answers = demand(6.0, num_input=12_000, num_output=20), demand(12.0, num_input=200, num_output=2500)
    for may_change in (True, False):
        scaler, size = Scaler(replace(POLICY, window_s=60.0, change_roles=may_change), SLO), ReplicaTarget(1, 1)
        changes = []
        for i, what in enumerate([prompts] * 40 + [demand(0.2)] * 30 + [answers] * 10, start=1):
            decision = scaler.decide(state(5.0 * i, what, size))
            for change in decision.changes:
                assert size.prefill - change.number >= decision.needed.prefill
            changes += [change for change in decision.changes if i > 70]
            size = decision.target
        assert {(one.source, one.to) for one in changes} == ({("prefill", "decode")} if may_change else set())


def test_the_backlog_is_to_be_done_before_a_new_worker_serves() -> None:
    quiet = state(5.0, demand(6.0), ReplicaTarget(4, 2))
    behind = replace(quiet, num_queued_tokens=10**7)
    assert Scaler(POLICY, SLO).decide(behind).needed.prefill > Scaler(POLICY, SLO).decide(quiet).needed.prefill
    crowded = replace(quiet, num_running_seqs=2000)
    assert Scaler(POLICY, SLO).decide(crowded).needed.decode > Scaler(POLICY, SLO).decide(quiet).needed.decode


def test_an_unreachable_target_is_reported_and_adds_no_workers() -> None:
    """A step of one sequence takes 7.1 ms."""
    tight, free = (Scaler(POLICY, Slo(ttft_s=2.0, itl_s=itl_s)) for itl_s in (5e-3, None))
    decision = decide_each(tight, [20.0] * 3, ReplicaTarget(1, 1))[0]
    assert decision.needed.decode == decide_each(free, [20.0] * 3, ReplicaTarget(1, 1))[0].needed.decode
    assert "alone takes 7.11 ms a token, more than slo.itl_ms: no number of workers helps" in " ".join(decision.reasons)
    assert "no number" not in " ".join(decide_each(Scaler(POLICY, SLO), [20.0] * 3, ReplicaTarget(1, 1))[0].reasons)


def test_the_first_token_of_each_output_is_not_decoded() -> None:
    """Outputs of two tokens decode one token each."""
    scaler = Scaler(POLICY, SLO)
    for i in range(1, 11):
        decision = scaler.decide(state(5.0 * i, demand(20.0, num_output=2), ReplicaTarget(4, 4)))
    assert decision.forecast is not None and decision.forecast.num_decoding > 0


ASLEEP = PlannerConfig(min_prefill=0, min_decode=0, idle_s=60.0, window_s=300.0, scale_down_s=300.0)
NOBODY = ReplicaTarget(0, 0)


def asleep(at: float, what: Demand | None, *, num_waiting: int = 0) -> ClusterState:
    """Return the state of a cluster without workers, which nobody can measure."""
    empty = ClusterState(at=at, demand=what, prefill=PoolState(), decode=PoolState())
    return replace(empty, num_queued_requests=num_waiting, num_queued_tokens=100 * num_waiting)


def test_pools_go_to_no_workers_once_idle_and_not_before() -> None:
    decisions = decide_each(Scaler(ASLEEP, SLO), [2.0] * 10 + [0.0] * 40, ReplicaTarget(1, 1))
    targets = [decision.target for decision in decisions]
    # The last request was seen at 50 s.
    assert set(targets[:21]) == {(1, 1)} and set(targets[21:]) == {NOBODY}
    assert "there has been no request for 60 s" in decisions[21].reasons
    kept = decide_each(Scaler(replace(ASLEEP, min_decode=1), SLO), [2.0] * 10 + [0.0] * 40, ReplicaTarget(1, 1))
    assert kept[20].target == (1, 1) and kept[21].target == (0, 1)
    default = decide_each(Scaler(POLICY, SLO), [2.0] * 10 + [0.0] * 400, ReplicaTarget(1, 1))
    assert default[-1].target == (1, 1), "a minimum of 1 stays"


def test_a_worker_that_begins_to_serve_after_a_long_start_stays_until_idle() -> None:
    """A gateway learns the tokenizer from it."""
    scaler = Scaler(ASLEEP, SLO)
    starting = replace(asleep(5.0, demand(0.0)), prefill=PoolState(0, 1), decode=PoolState(0, 1))
    for at in (5.0, 100.0, 200.0):
        assert scaler.decide(replace(starting, at=at)).target == (1, 1), "nothing is known of its speed"
    for at in (205.0, 260.0):
        assert scaler.decide(state(at, demand(0.0), ReplicaTarget(1, 1))).target == (1, 1)
    assert scaler.decide(state(265.0, demand(0.0), ReplicaTarget(1, 1))).target == NOBODY


def test_requests_that_wait_or_run_keep_a_worker_of_each_role() -> None:
    for busy in ({"num_queued_requests": 1}, {"num_running_seqs": 1}):
        scaler = Scaler(ASLEEP, SLO)
        decide_each(scaler, [2.0] * 10, ReplicaTarget(1, 1))
        late = replace(state(500.0, demand(0.0), ReplicaTarget(1, 1)), **busy)  # type: ignore[arg-type]
        assert scaler.decide(late).target == (1, 1)
        assert scaler.decide(state(559.0, demand(0.0), ReplicaTarget(1, 1))).target == (1, 1)
        assert scaler.decide(state(560.0, demand(0.0), ReplicaTarget(1, 1))).target == NOBODY


def test_a_request_wakes_both_roles_at_the_next_decision() -> None:
    scaler = Scaler(ASLEEP, SLO)
    size = decide_each(scaler, [2.0] * 10 + [0.0] * 40, ReplicaTarget(1, 1))[-1].target
    assert size == NOBODY and scaler.decide(asleep(300.0, demand(0.0))).target == NOBODY
    woken = scaler.decide(asleep(301.0, demand(1.0, seconds=1.0), num_waiting=1))
    assert woken.target == (1, 1) and not woken.held_back
    assert "requests that wait at gateways: 1, and a role has no worker" in woken.reasons
    # The worker starts; nobody else arrives.
    starting = replace(asleep(400.0, demand(0.0)), prefill=PoolState(0, 1), decode=PoolState(0, 1))
    assert scaler.decide(replace(starting, num_queued_requests=1)).target == (1, 1)
    # The start has failed, and the request still waits.
    assert scaler.decide(asleep(405.0, demand(0.0), num_waiting=1)).target == (1, 1)


def test_a_planner_that_starts_while_all_workers_are_away_wakes_them_and_does_nothing_else() -> None:
    for what in (None, demand(0.0)):
        scaler = Scaler(ASLEEP, SLO)
        quiet = scaler.decide(asleep(5.0, what))
        assert quiet.target == NOBODY and quiet.held_back
        woken = scaler.decide(asleep(10.0, what, num_waiting=3))
        assert woken.target == (1, 1) and not woken.held_back and woken.reasons[0] == quiet.held_back
    assert Scaler(ASLEEP, SLO).decide(state(5.0, None, ReplicaTarget(3, 2))).target == (3, 2)


def test_mixed_workers_let_the_other_pools_sleep() -> None:
    mixed = replace(asleep(5.0, demand(0.0), num_waiting=1), mixed=PoolState(1))
    assert Scaler(ASLEEP, SLO).decide(mixed).target == NOBODY


def test_requests_that_waited_for_the_first_worker_do_not_correct_the_model() -> None:
    scaler = Scaler(replace(ASLEEP, start_s=20.0), SLO)
    decide_each(scaler, [0.0] * 13, ReplicaTarget(1, 1))
    assert scaler.decide(asleep(70.0, demand(6.0), num_waiting=30)).target > NOBODY
    for i in range(1, 20):
        late = replace(demand(6.0), num_served=30, num_late_ttft=30 if i < 4 else 0)
        decision = scaler.decide(state(70.0 + 5 * i, late, ReplicaTarget(1, 1)))
        assert decision.forecast is not None and decision.forecast.prefill_correction == 1.0


def test_decisions_follow_each_other_sooner_while_nobody_serves() -> None:
    nobody = asleep(5.0, None)
    some = [replace(nobody, **{role: PoolState(0, 1)}) for role in ("prefill", "decode", "mixed")]  # type: ignore[arg-type]
    assert [pause_s(one, 5.0) for one in (nobody, None, *some)] == [1.0, 5.0, 5.0, 5.0, 5.0]
    assert pause_s(nobody, 0.5) == 0.5 and pause_s(replace(nobody, decode=PoolState(0, 0, 1)), 5.0) == 1.0
