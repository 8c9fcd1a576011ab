"""Decides how many workers of each role there should be, one observation after another; does nothing about it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tandem.scaling import burst_replay
from tandem.scaling.cluster_state import ClusterState, Demand, PoolState, WorkerCapacity
from tandem.scaling.decision import Decision, DemandForecast, ReplicaTarget, RoleChange
from tandem.scaling.decode_capacity import DecodeDemand, decode_workers, is_in_reach, largest_batch, step_s
from tandem.scaling.demand_history import History
from tandem.scaling.forecast import dispersion, expected_level, expected_rate
from tandem.scaling.model_correction import Correction
from tandem.scaling.policy import Bounds, ScalingPolicy
from tandem.scaling.queueing import ServiceDemand, least_workers
from tandem.scaling.request_profile import RequestProfile, prompt_work
from tandem.scaling.role_rebalancing import needed_beside_mixed, role_changes
from tandem.scaling.scale_down_stabilization import StabilizationWindow

_PAST_WINDOWS = 2
"""So many are what bursts are learned from."""
_LEAVE_SHARE = 4
"""A pool loses at most a part of so many at once."""


@dataclass(frozen=True, slots=True)
class _Workers:
    """One that computes prompts, and one that decodes."""

    prefill: WorkerCapacity
    decode: WorkerCapacity


class Scaler:
    """One model's. Equal observations give equal decisions."""

    def __init__(self, policy: ScalingPolicy) -> None:
        self._policy = policy
        self._history = History(policy.window_s)
        self._past = History(_PAST_WINDOWS * policy.window_s)
        gap_s = max(policy.start_s, 3 * policy.interval_s)
        self._steady = tuple(StabilizationWindow(policy.scale_down_s, gap_s) for _ in ReplicaTarget._fields)
        self._spare = tuple(
            StabilizationWindow(min(policy.start_s, policy.scale_down_s), gap_s) for _ in ReplicaTarget._fields
        )
        self._corrections = tuple(Correction(policy.start_s, policy.tolerated) for _ in ReplicaTarget._fields)
        self._workers: _Workers | None = None
        self._asked = ReplicaTarget(0, 0)
        self._at = -math.inf

    def decide(self, observed: ClusterState) -> Decision:
        """Of an observation that is later than the one before."""
        self._learn(observed)
        why = self._why_not(observed)
        if why:
            return self._hold(observed, why)
        assert observed.demand is not None and self._workers is not None
        self._at = observed.at
        self._history.add(observed.at, observed.demand)
        self._past.add(observed.at, observed.demand)
        self._correct(observed, observed.demand)
        forecast, needed = self._needed(observed, self._workers)
        return self._settle(observed, forecast, needed)

    # ---- whether anything can be said

    def _learn(self, observed: ClusterState) -> None:
        """What workers can do stays known while there is none."""
        known = self._workers
        prefill = observed.prefill_worker or (known.prefill if known else None) or observed.decode_worker
        decode = observed.decode_worker or (known.decode if known else None) or observed.prefill_worker
        if prefill is not None and decode is not None:
            self._workers = _Workers(prefill, decode)

    def _why_not(self, observed: ClusterState) -> str:
        if not observed.at > self._at:
            return f"the observation of {observed.at:g} s is not newer than the one before"
        if observed.demand is None or observed.demand.seconds <= 0:
            return "no gateway has told what it was asked for"
        if self._workers is None:
            return "no worker has told how fast it is"
        return ""

    def _hold(self, observed: ClusterState, why: str) -> Decision:
        current, policy = _current(observed), self._policy
        target = ReplicaTarget(policy.prefill.clamped(current.prefill), policy.decode.clamped(current.decode))
        return Decision(target=target, needed=current, forecast=None, reasons=(why,), held_back=why)

    # ---- what is needed

    def _correct(self, observed: ClusterState, demand: Demand) -> None:
        pools = (observed.prefill, observed.decode)
        had_enough = all(pool.num_serving >= asked for pool, asked in zip(pools, self._asked, strict=True))
        num_served, num_late_itl = demand.num_served, demand.num_late_itl
        counts = (
            (demand.num_late_ttft, demand.num_requests if num_served is None else num_served),
            (demand.num_late_gaps, demand.num_gaps)
            if num_served is None or num_late_itl is None
            else (num_late_itl, num_served),
        )
        for correction, (num_late, num_all) in zip(self._corrections, counts, strict=True):
            correction.add(observed.at, num_late, num_all, had_enough=had_enough)

    def _needed(self, observed: ClusterState, workers: _Workers) -> tuple[DemandForecast, ReplicaTarget]:
        policy, means = self._policy, RequestProfile.of(self._history.total)
        arrivals = self._history.samples(lambda demand: demand.num_requests)
        burstiness = dispersion(arrivals)
        rate = expected_level(arrivals, policy.start_s)
        tokens = expected_level(self._history.samples(lambda demand: demand.num_input_tokens), policy.start_s)
        whole = means.num_fresh + means.num_cached
        # Prompts that are longer just now count as more of them.
        work = prompt_work(workers.prefill, means, max(rate, tokens / whole if whole else 0.0), burstiness)
        factors = [correction.factor for correction in self._corrections]
        prefill = self._prefill(observed, work, workers.prefill, factors[0])
        decoding = expected_rate(arrivals, policy.start_s)
        steps = DecodeDemand(decoding * factors[1], max(0.0, means.num_output - 1), means.context, burstiness)
        decode, together = decode_workers(workers.decode, steps, policy.slo.itl_s, policy.tolerated, policy.headroom)
        running = observed.num_running_seqs + observed.num_queued_requests
        decode = max(decode, math.ceil(running / largest_batch(workers.decode, means.context, policy.slo.itl_s)))
        forecast = DemandForecast(
            request_rate=rate, input_rate=work.rate * means.num_fresh, output_rate=decoding * means.num_output,
            cached_share=means.cached_share, mean_context=means.context, prefill_load=work.load,
            num_decoding=together, prefill_correction=factors[0], decode_correction=factors[1],
        )  # fmt: skip
        return forecast, ReplicaTarget(prefill, decode)

    def _prefill(self, observed: ClusterState, work: ServiceDemand, worker: WorkerCapacity, factor: float) -> int:
        """Enough for arrivals by chance, and for the bursts of the past. What waits already is to be done by the time
        at which a worker that starts now serves."""
        policy = self._policy
        behind_s = observed.num_queued_tokens * worker.cost.prefill_token_s
        more = behind_s / policy.start_s / work.mean_s if work.mean_s > 0 else 0.0
        grown = replace(work, rate=(work.rate + more) * factor)
        number = least_workers(grown, policy.slo.ttft_s, policy.tolerated, policy.headroom)
        if policy.slo.ttft_s is None or work.load <= 0:
            return number
        past = burst_replay.shape(self._past.samples(lambda demand: demand.num_input_tokens), policy.window_s / 2)
        # What a long prompt itself takes is not left for waiting.
        left_s = policy.slo.ttft_s - work.mean_s * (1 + math.sqrt(work.service_scv))
        slack_s = max(left_s, policy.slo.ttft_s / 4)
        return max(number, burst_replay.least_workers(past, grown.load, slack_s, policy.tolerated))

    # ---- what to do about it

    def _settle(self, observed: ClusterState, forecast: DemandForecast, needed: ReplicaTarget) -> Decision:
        policy, current = self._policy, _current(observed)
        rest = needed_beside_mixed(needed, observed.mixed.num_serving)
        bounded = ReplicaTarget(policy.prefill.clamped(rest.prefill), policy.decode.clamped(rest.decode))
        for role, number in enumerate(bounded):
            self._steady[role].add(observed.at, number)
            self._spare[role].add(observed.at, number)
        changes = self._changes(observed, current, bounded)
        changed = _after(current, changes)
        held = ReplicaTarget(*(steady.settled(number) for steady, number in zip(self._steady, changed, strict=True)))
        target = self._left_safely(observed, changed, held)
        self._asked = bounded
        reasons = (
            *_why(forecast, needed),
            *self._why_late(forecast),
            *(_why_role(role, n, t) for role, n, t in _moves(current, target)),
        )
        return Decision(target=target, changes=changes, needed=needed, forecast=forecast, reasons=reasons)

    def _why_late(self, forecast: DemandForecast) -> tuple[str, ...]:
        itl_s, context = self._policy.slo.itl_s, forecast.mean_context
        worker = self._workers.decode if self._workers is not None else None
        if itl_s is None or worker is None or is_in_reach(worker, context, itl_s):
            return ()
        alone_ms = 1e3 * step_s(worker, 1, context)
        return (f"a sequence alone takes {alone_ms:.3g} ms a token, more than slo.itl_ms: no number of workers helps",)

    def _changes(
        self, observed: ClusterState, current: ReplicaTarget, bounded: ReplicaTarget
    ) -> tuple[RoleChange, ...]:
        if not self._policy.change_roles:
            return ()
        pools = (observed.prefill, observed.decode)
        spare = ReplicaTarget(*(
            max(0, min(pool.num_serving, number - steady.settled(number)))
            for pool, number, steady in zip(pools, current, self._spare, strict=True)
        ))  # fmt: skip
        return role_changes(current, bounded, spare)

    def _left_safely(self, observed: ClusterState, current: ReplicaTarget, held: ReplicaTarget) -> ReplicaTarget:
        """A part of a pool at a time, and none while others of it still leave."""
        return ReplicaTarget(
            _left(observed.prefill, current.prefill, held.prefill, self._policy.prefill),
            _left(observed.decode, current.decode, held.decode, self._policy.decode),
        )


def _left(pool: PoolState, current: int, held: int, bounds: Bounds) -> int:
    if held >= current:
        return held
    most = 0 if pool.num_draining else max(1, current // _LEAVE_SHARE)
    return bounds.clamped(max(held, current - most))


def _current(observed: ClusterState) -> ReplicaTarget:
    return ReplicaTarget(observed.prefill.num_kept, observed.decode.num_kept)


def _after(current: ReplicaTarget, changes: tuple[RoleChange, ...]) -> ReplicaTarget:
    prefill, decode = current
    for change in changes:
        sign = 1 if change.to == "prefill" else -1
        prefill, decode = prefill + sign * change.number, decode - sign * change.number
    return ReplicaTarget(prefill, decode)


def _moves(current: ReplicaTarget, target: ReplicaTarget) -> list[tuple[str, int, int]]:
    return [
        (role, now, then) for role, now, then in zip(ReplicaTarget._fields, current, target, strict=True) if now != then
    ]


def _why(forecast: DemandForecast, needed: ReplicaTarget) -> tuple[str, ...]:
    return (
        f"{forecast.request_rate:.2f} requests/s with {forecast.input_rate:,.0f} prompt tokens/s to compute will come "
        f"({forecast.cached_share:.0%} of prompts cached): they keep {forecast.prefill_load:.2f} prefill workers busy, "
        f"and {needed.prefill} are needed",
        f"{forecast.output_rate:,.0f} output tokens/s are expected: {forecast.num_decoding:.1f} sequences decode at "
        f"once with {forecast.mean_context:,.0f} tokens of context, for which {needed.decode} workers are needed",
    )


def _why_role(role: str, now: int, then: int) -> str:
    return f"{role} grows from {now} to {then}" if then > now else f"{role} shrinks from {now} to {then}"
