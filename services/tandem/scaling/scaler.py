"""Decide how many workers of each role one model should have, from successive observations of a cluster."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

from tandem.core.config import PlannerConfig
from tandem.core.slo import Slo
from tandem.scaling import burst_replay
from tandem.scaling.cluster_state import ClusterState, Demand, PoolState, WorkerCapacity
from tandem.scaling.decision import Decision, DemandForecast, ReplicaTarget, RoleChange
from tandem.scaling.decode_capacity import DecodeDemand, alone_s, decode_workers, largest_batch
from tandem.scaling.forecast import History, dispersion, expected_level, expected_rate
from tandem.scaling.model_correction import Correction
from tandem.scaling.queueing import ServiceDemand, least_workers
from tandem.scaling.request_profile import RequestProfile, prompt_work

_PAST_WINDOWS = 2
"""Number of policy windows from which bursts are learned."""
_LEAVE_SHARE = 4
"""A pool loses at most this fraction, 1 / _LEAVE_SHARE, of its workers at once."""


WAKE_LOOK_S = 1.0
"""Most seconds between two decisions while there is no worker, because every request waits for the next one. Gateways
publish what waits once a second."""


def pause_s(state: ClusterState | None, interval_s: float) -> float:
    """Return the seconds from one decision to the next: `interval_s`, but at most `WAKE_LOOK_S` while no worker serves
    or starts.

    `state`: the state on which the first of the two decisions was based; None if too little could be observed.
    """
    return min(interval_s, WAKE_LOOK_S) if state is not None and state.has_no_workers else interval_s


def clamped(number: int, least: int, most: int) -> int:
    """Return `number` raised to at least `least` and reduced to at most `most`; 0 for `most` means no upper bound."""
    return max(least, min(number, most or number))


def needed_beside_mixed(needed: ReplicaTarget, num_mixed: int) -> ReplicaTarget:
    """Return the prefill and decode workers needed in addition to `num_mixed` mixed workers.

    A mixed worker does both kinds of work, so it replaces one worker in total; the replaced ones are divided between
    the roles in proportion to their needs.
    """
    total = needed.prefill + needed.decode
    num_replaced = min(num_mixed, total)
    prefill = round(num_replaced * needed.prefill / total) if total else 0
    return ReplicaTarget(needed.prefill - prefill, needed.decode - (num_replaced - prefill))


def role_changes(current: ReplicaTarget, desired: ReplicaTarget, spare: ReplicaTarget) -> tuple[RoleChange, ...]:
    """Return at most one change of role, from a role with too many workers to one that has fewer than desired.

    `current`, `desired`: the number of workers that each role has and should have. `spare`: how many serving workers
    each role can lose. Returns an empty tuple where no change helps.
    """
    from_prefill = min(spare.prefill, desired.decode - current.decode)
    from_decode = min(spare.decode, desired.prefill - current.prefill)
    if from_prefill > 0:
        return (RoleChange("prefill", "decode", from_prefill),)
    if from_decode > 0:
        return (RoleChange("decode", "prefill", from_decode),)
    return ()


class StabilizationWindow:
    """Delay the removal of workers of one role until fewer workers have been enough for `hold_s` seconds.

    Each call of `add` records a need: how many workers the role needs at that time. `settled` returns how many it
    should have. This number rises to the latest need immediately. It falls only once needs have been recorded for
    `hold_s` seconds, and then to the highest need of the last `hold_s` seconds. So where the need goes up and down
    within this time, the number of workers stays at the highest need. If more than `gap_s` seconds pass between two
    needs, all earlier needs are forgotten and the `hold_s` seconds begin anew.
    """

    def __init__(self, hold_s: float, gap_s: float) -> None:
        self._hold_s = hold_s
        self._gap_s = gap_s
        self._since = 0.0
        self._needs: deque[tuple[float, int]] = deque()
        """(time, need) of the last `hold_s` seconds."""

    def add(self, at: float, number: int) -> None:
        """Add the number of workers that is needed at the time `at`."""
        if not self._needs or at - self._needs[-1][0] > self._gap_s:
            self._since = at
            self._needs.clear()
        self._needs.append((at, number))
        while self._needs[0][0] < at - self._hold_s:
            self._needs.popleft()

    def settled(self, current: int) -> int:
        """Return the number of workers that the role should have, given the needs added so far; `current`, its present
        number, where no need was added."""
        if not self._needs:
            return current
        last, need = self._needs[-1]
        highest = max(number for _, number in self._needs)
        return highest if highest < current and last - self._since >= self._hold_s else max(current, need)


class Scaler:
    """Decide how many prefill and decode workers one model needs to meet the targets of `slo`, from successive
    observations of the cluster.

    `policy` holds the planner's settings. A scaler keeps the demand of the last minutes and what it has learned from
    it; it starts and stops no workers. Equal sequences of observations give equal decisions.
    """

    def __init__(self, policy: PlannerConfig, slo: Slo) -> None:
        self._policy = policy
        self._slo = slo
        self._tolerated = 1 - policy.percentile / 100
        self._history = History(policy.window_s)
        self._past = History(_PAST_WINDOWS * policy.window_s)
        gap_s = max(policy.start_s, 3 * policy.interval_s)
        self._stabilization = tuple(StabilizationWindow(policy.scale_down_s, gap_s) for _ in ReplicaTarget._fields)
        self._spare_windows = tuple(
            StabilizationWindow(min(policy.start_s, policy.scale_down_s), gap_s) for _ in ReplicaTarget._fields
        )
        self._corrections = tuple(Correction(policy.start_s, self._tolerated) for _ in ReplicaTarget._fields)
        self._prefill_worker: WorkerCapacity | None = None
        self._decode_worker: WorkerCapacity | None = None
        self._last_bounded = ReplicaTarget(0, 0)
        self._at = -math.inf
        self._busy_at: float | None = None
        """Time of the last observation with a request that had arrived, waited or ran; None before the first. The
        first observation of a cluster with workers counts as well, and so does one in which a worker has begun to
        serve, because gateways may not know its model yet."""
        self._num_serving = 0
        self._lacked_at = -math.inf
        """When a role that needs workers last had none that serves."""

    def decide(self, state: ClusterState) -> Decision:
        """Return the decision for an observation; observations must be passed in order of time.

        The decision is held back (`Decision.held_back`) when `state` is not newer than the one before, when no gateway
        has reported demand, or when no worker has reported step costs. Its target is then the current number of
        workers, raised or reduced to the bounds of the settings. It is not held back where requests wait and a role has
        no worker: that role then gets its first worker.
        """
        # They stay known while there is no worker, and stand in for each other until both are known.
        self._prefill_worker = state.prefill_worker or self._prefill_worker or state.decode_worker
        self._decode_worker = state.decode_worker or self._decode_worker or state.prefill_worker
        self._note_requests(state)
        reason = self._why_not(state)
        if reason:
            return self._hold(state, reason)
        assert state.demand is not None and self._prefill_worker is not None and self._decode_worker is not None
        self._at = state.at
        self._history.add(state.at, state.demand)
        self._past.add(state.at, state.demand)
        self._correct(state, state.demand)
        forecast, needed = self._needed(state, self._prefill_worker, self._decode_worker)
        return self._settle(state, forecast, needed)

    # ---- preconditions

    def _why_not(self, state: ClusterState) -> str:
        if not state.at > self._at:
            return f"the observation of {state.at:g} s is not newer than the one before"
        if state.demand is None or state.demand.seconds <= 0:
            return "no gateway has reported its demand"
        if self._prefill_worker is None:
            return "no worker has reported its step costs"
        return ""

    def _hold(self, state: ClusterState, reason: str) -> Decision:
        current = _current(state)
        target = self._bounded(current, self._least(state))
        if _wakes(state, current, target):
            return Decision(
                target=target, needed=target, forecast=None, reasons=(reason, *_why_changed(state, current, target))
            )
        return Decision(target=target, needed=current, forecast=None, reasons=(reason,), held_back=reason)

    # ---- pools without workers

    def _note_requests(self, state: ClusterState) -> None:
        num_serving = state.prefill.num_serving + state.decode.num_serving
        has_begun = num_serving > self._num_serving or (self._busy_at is None and any(_current(state)))
        if _has_requests(state) or has_begun:
            self._busy_at = state.at
        self._num_serving = num_serving

    def _is_idle(self, state: ClusterState) -> bool:
        """Return whether there has been no request for so long that pools whose minimum is 0 have no worker."""
        return self._busy_at is None or state.at - self._busy_at >= self._policy.idle_s

    def _least(self, state: ClusterState) -> ReplicaTarget:
        """Return the fewest workers of each role: the minimum of the settings, and one in addition to a minimum of 0
        while there are requests, or from the last one until the pool is idle. Mixed workers make that one
        unnecessary."""
        policy = self._policy
        current = ReplicaTarget(0, 0) if self._is_idle(state) else _current(state)
        is_needed = [number > 0 or _has_requests(state) for number in current]
        if state.mixed.num_kept:
            is_needed = [False, False]
        return ReplicaTarget(max(policy.min_prefill, is_needed[0]), max(policy.min_decode, is_needed[1]))

    # ---- what is needed

    def _correct(self, state: ClusterState, demand: Demand) -> None:
        pools = (state.prefill, state.decode)
        expected = tuple(zip(pools, self._last_bounded, strict=True))
        had_enough = all(pool.num_serving >= number for pool, number in expected)
        if any(number and not pool.num_serving for pool, number in expected):
            self._lacked_at = state.at
        # Requests that waited for the first worker are late, and end some time after it serves.
        had_enough = had_enough and state.at - self._lacked_at >= self._policy.start_s
        num_served = demand.num_requests if demand.num_served is None else demand.num_served
        counts = ((demand.num_late_ttft, num_served), (demand.num_late_gaps, demand.num_gaps))
        for correction, (num_late, num_all) in zip(self._corrections, counts, strict=True):
            correction.add(state.at, num_late, num_all, had_enough=had_enough)

    def _needed(
        self, state: ClusterState, prefill_worker: WorkerCapacity, decode_worker: WorkerCapacity
    ) -> tuple[DemandForecast, ReplicaTarget]:
        policy = self._policy
        profile = RequestProfile.of(self._history.total)
        arrivals = self._history.samples(lambda demand: demand.num_requests)
        burstiness = dispersion(arrivals)
        rate = expected_level(arrivals, policy.start_s)
        tokens = expected_level(self._history.samples(lambda demand: demand.num_input_tokens), policy.start_s)
        num_prompt = profile.num_fresh + profile.num_cached
        # Prompts that are longer at present count as more prompts.
        prompt_demand = prompt_work(
            prefill_worker, profile, max(rate, tokens / num_prompt if num_prompt else 0.0), burstiness
        )
        factors = [correction.factor for correction in self._corrections]
        prefill = self._prefill(state, prompt_demand, prefill_worker, factors[0])
        decode_rate = expected_rate(arrivals, policy.start_s)
        steps = DecodeDemand(decode_rate * factors[1], max(0.0, profile.num_output - 1), profile.context, burstiness)
        itl_s = self._slo.itl_s
        decode, num_concurrent = decode_workers(decode_worker, steps, itl_s, self._tolerated, policy.headroom)
        running = state.num_running_seqs + state.num_queued_requests
        decode = max(decode, math.ceil(running / largest_batch(decode_worker, profile.context, itl_s)))
        forecast = DemandForecast(
            request_rate=rate, input_rate=prompt_demand.rate * profile.num_fresh,
            output_rate=decode_rate * profile.num_output,
            cached_share=profile.cached_share, mean_context=profile.context, prefill_load=prompt_demand.load,
            num_decoding=num_concurrent, prefill_correction=factors[0], decode_correction=factors[1],
        )  # fmt: skip
        return forecast, ReplicaTarget(prefill, decode)

    def _prefill(self, state: ClusterState, prompt_demand: ServiceDemand, worker: WorkerCapacity, factor: float) -> int:
        """Return the prefill workers for random arrivals and for past bursts. The present backlog is to be done by the
        time at which a worker that starts now serves."""
        policy = self._policy
        behind_s = state.num_queued_tokens * worker.cost.prefill_token_s
        extra_rate = behind_s / policy.start_s / prompt_demand.mean_s if prompt_demand.mean_s > 0 else 0.0
        scaled_demand = replace(prompt_demand, rate=(prompt_demand.rate + extra_rate) * factor)
        number = least_workers(scaled_demand, self._slo.ttft_s, self._tolerated, policy.headroom)
        if self._slo.ttft_s is None or prompt_demand.load <= 0:
            return number
        past = burst_replay.shape(self._past.samples(lambda demand: demand.num_input_tokens), policy.window_s / 2)
        # The time of a long prompt's own computation is not available for waiting.
        wait_limit_s = self._slo.ttft_s - prompt_demand.mean_s * (1 + math.sqrt(prompt_demand.service_scv))
        slack_s = max(wait_limit_s, self._slo.ttft_s / 4)
        return max(number, burst_replay.least_workers(past, scaled_demand.load, slack_s, self._tolerated))

    # ---- the target

    def _settle(self, state: ClusterState, forecast: DemandForecast, needed: ReplicaTarget) -> Decision:
        policy = self._policy
        current = _current(state)
        rest = needed_beside_mixed(needed, state.mixed.num_serving)
        least = self._least(state)
        sleeps = self._is_idle(state) and not all(least)
        bounded = self._bounded(_asleep(rest, least) if sleeps else rest, least)
        for role, number in enumerate(bounded):
            self._stabilization[role].add(state.at, number)
            self._spare_windows[role].add(state.at, number)
        changes = self._changes(state, current, bounded)
        changed = _after(current, changes)
        stabilized = ReplicaTarget(
            *(window.settled(number) for window, number in zip(self._stabilization, changed, strict=True))
        )
        if sleeps:  # `idle_s` has passed since the last request, however long fewer workers have been enough
            stabilized = _asleep(stabilized, least)
        target = ReplicaTarget(
            _limit_reduction(state.prefill, changed.prefill, stabilized.prefill, least.prefill, policy.max_prefill),
            _limit_reduction(state.decode, changed.decode, stabilized.decode, least.decode, policy.max_decode),
        )
        self._last_bounded = bounded
        reasons = (
            *_why(forecast, needed),
            *self._why_late(forecast),
            *((f"there has been no request for {policy.idle_s:g} s",) if sleeps else ()),
            *_why_changed(state, current, target),
        )
        return Decision(target=target, changes=changes, needed=needed, forecast=forecast, reasons=reasons)

    def _bounded(self, target: ReplicaTarget, least: ReplicaTarget) -> ReplicaTarget:
        policy = self._policy
        return ReplicaTarget(
            clamped(target.prefill, least.prefill, policy.max_prefill),
            clamped(target.decode, least.decode, policy.max_decode),
        )

    def _why_late(self, forecast: DemandForecast) -> tuple[str, ...]:
        assert self._decode_worker is not None
        itl_s, seconds = self._slo.itl_s, alone_s(self._decode_worker, forecast.mean_context)
        if itl_s is None or seconds <= itl_s:
            return ()
        alone_ms = 1e3 * seconds
        return (f"a sequence alone takes {alone_ms:.3g} ms a token, more than slo.itl_ms: no number of workers helps",)

    def _changes(self, state: ClusterState, current: ReplicaTarget, bounded: ReplicaTarget) -> tuple[RoleChange, ...]:
        if not self._policy.change_roles:
            return ()
        pools = (state.prefill, state.decode)
        spare = ReplicaTarget(*(
            max(0, min(pool.num_serving, number - window.settled(number)))
            for pool, number, window in zip(pools, current, self._spare_windows, strict=True)
        ))  # fmt: skip
        return role_changes(current, bounded, spare)


def _limit_reduction(pool: PoolState, current: int, stabilized: int, least: int, most: int) -> int:
    """Return the stabilized number, raised if the pool would lose more than 1 / _LEAVE_SHARE of its workers at once
    (but one is always allowed), or any while others of the pool still drain."""
    if stabilized >= current:
        return stabilized
    max_reduction = 0 if pool.num_draining else max(1, current // _LEAVE_SHARE)
    return clamped(max(stabilized, current - max_reduction), least, most)


def _current(state: ClusterState) -> ReplicaTarget:
    return ReplicaTarget(state.prefill.num_kept, state.decode.num_kept)


def _has_requests(state: ClusterState) -> bool:
    """Return whether a request has arrived since the last observation, waits at a gateway or runs at a worker."""
    has_arrived = state.demand is not None and state.demand.num_requests > 0
    return bool(has_arrived or state.num_queued_requests or state.num_queued_tokens or state.num_running_seqs)


def _asleep(numbers: ReplicaTarget, least: ReplicaTarget) -> ReplicaTarget:
    """Return `numbers` with 0 for each role that may have no worker."""
    return ReplicaTarget(*(number if fewest else 0 for number, fewest in zip(numbers, least, strict=True)))


def _after(current: ReplicaTarget, changes: tuple[RoleChange, ...]) -> ReplicaTarget:
    to_prefill = sum(change.number if change.to == "prefill" else -change.number for change in changes)
    return ReplicaTarget(current.prefill + to_prefill, current.decode - to_prefill)


def _wakes(state: ClusterState, current: ReplicaTarget, target: ReplicaTarget) -> bool:
    """Return whether requests that wait at gateways get the first worker of a role."""
    return state.num_queued_requests > 0 and any(then > now == 0 for now, then in zip(current, target, strict=True))


def _why_changed(state: ClusterState, current: ReplicaTarget, target: ReplicaTarget) -> tuple[str, ...]:
    waiting = f"requests that wait at gateways: {state.num_queued_requests}, and a role has no worker"
    return (
        *((waiting,) if _wakes(state, current, target) else ()),
        *(
            f"{role} {'grows' if then > now else 'shrinks'} from {now} to {then}"
            for role, now, then in zip(ReplicaTarget._fields, current, target, strict=True)
            if now != then
        ),
    )


def _why(forecast: DemandForecast, needed: ReplicaTarget) -> tuple[str, ...]:
    return (
        f"{forecast.request_rate:.2f} requests/s with {forecast.input_rate:,.0f} uncached prompt tokens/s are expected "
        f"({forecast.cached_share:.0%} of prompts cached): they keep {forecast.prefill_load:.2f} prefill workers busy, "
        f"and {needed.prefill} are needed",
        f"{forecast.output_rate:,.0f} output tokens/s are expected: {forecast.num_decoding:.1f} sequences decode at "
        f"once with {forecast.mean_context:,.0f} tokens of context, for which {needed.decode} workers are needed",
    )
