"""Choose running sequences that should move to another decode worker: because their inter-token latency (ITL) would be
much shorter there, because they were preempted, or because their worker only computes prompts now."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Literal

from tandem.core.ids import JobKey, WorkerRef
from tandem.core.lane import Lane
from tandem.core.step_cost import StepCost, StepFeatures
from tandem.routing.link_bandwidth import LinkBandwidth
from tandem.routing.routing_request import EXPECTED_OUTPUT
from tandem.routing.worker_view import Pair, WorkerView, can_serve_prefix, decode_cost, token_bytes

HANDOVER_STEPS = 2
"""Steps of the source that a hand-off costs besides the copy of the KV: the step of the last token there, and the step
of the first one on the target."""
MAX_MOVE_SHARE = 0.1
"""A sequence moves only if its move takes at most this fraction of the time that its remaining tokens may take."""
NUM_TARGETS = 4
"""Most workers that are tried as the target of one move."""


@dataclass(frozen=True, slots=True)
class MovableSequence:
    """A sequence that may move to another decode worker. `key`: the key of its choice in the job there.

    `num_context`: number of tokens of its prompt and of its output so far, whose KV moves. `num_left`: most tokens that
    it may still sample.
    """

    key: JobKey
    lane: Lane
    num_context: int
    num_left: int


@dataclass(frozen=True, slots=True)
class Relocation:
    """A sequence that should move from the worker `source` to the worker `target`.

    `reason`: "slow", because its ITL would be shorter there; "preempted", because it was preempted on `source`; or
    "prompts_only", because it decodes on a worker whose role is now to compute prompts only. `why`: the same as text
    for logs.
    """

    key: JobKey
    source: WorkerRef
    target: WorkerRef
    reason: Literal["slow", "preempted", "prompts_only"]
    why: str


@dataclass(frozen=True, slots=True)
class _DecodeWorker:
    """A decode worker and its step costs. `cost`: None where no sequence runs on the worker, since it has then measured
    no decode step lately, or where it has not reported its costs."""

    view: WorkerView
    cost: StepCost | None

    def itl_s(self, cost: StepCost, num_more: int = 0, num_context: int = 0) -> float:
        """Return the predicted seconds of a decode step, by the step costs `cost`, with `num_more` more sequences of
        `num_context` tokens each.

        Sequences that wait on the worker or are on their way to it count as decoding, because they decode soon.
        """
        context = self.view.num_held_tokens + num_more * num_context
        num_seqs = self.view.num_to_decode + num_more
        return cost.predict(StepFeatures(num_decode_seqs=num_seqs, decode_context=context))


@dataclass(frozen=True, slots=True)
class SlowWorker:
    """A decode worker from which a sequence should move.

    `cost`: its step costs. `itl_s`: its predicted ITL in seconds. `fastest`: all decode workers of the same model
    build, first those that decode nothing, then by rising ITL.
    """

    view: WorkerView
    cost: StepCost
    itl_s: float
    fastest: Sequence[_DecodeWorker]


@dataclass(frozen=True, slots=True)
class Rebalancing:
    """Choose the sequences that should move to another decode worker, and the worker to which each moves.

    - `targets_s`: the ITL target in seconds of each lane that has one.
    - `min_gain`: a sequence moves from a slow worker only where its predicted ITL becomes shorter by at least this
      fraction (0.2: by 20 %). The ITL that is predicted for the target includes the sequence itself, so it is not
      worthwhile to move it back later, unless several gateways move sequences to one worker at the same time.
    - `links`: the measured bandwidths between workers, which may change later.
    """

    targets_s: Mapping[Lane, float]
    min_gain: float
    links: LinkBandwidth

    def slow_workers(self, workers: Iterable[WorkerView], excluded: Set[Pair] = frozenset()) -> list[SlowWorker]:
        """Return the workers from which a sequence of average length should move to another worker, greatest ITL first.

        A worker is returned if it meets three conditions. It has at least two running sequences. There is another
        worker on which a sequence of the average length would have an ITL shorter by the fraction `min_gain`. And its
        own ITL exceeds the shortest ITL target of the lanes that it decodes, if any of them has a target. `excluded`:
        pairs (source, target) of workers between which nothing may move.
        """
        builds: defaultdict[tuple[str, str], list[_DecodeWorker]] = defaultdict(list)
        for view in workers:
            if view.decodes and view.block_size:
                cost = view.step_cost if view.load.num_running else None
                builds[view.model, view.fingerprint].append(_DecodeWorker(view, cost))
        found: list[SlowWorker] = []
        for members in builds.values():
            costs = [member.cost for member in members if member.cost is not None]
            if len(members) > 1 and costs:
                members.sort(key=lambda member: member.view.ref.id)
                members.sort(key=partial(_rank, usual=costs[0]))
                slow = [SlowWorker(one.view, one.cost, one.itl_s(one.cost), members) for one in members if one.cost]
                found += [one for one in slow if self._is_source(one) and any(self._targets(one, excluded))]
        return sorted(found, key=lambda one: (-one.itl_s, one.view.ref.id))

    def plan(
        self, source: SlowWorker, sequences: Sequence[MovableSequence], busy: Set[WorkerRef], excluded: Set[Pair]
    ) -> Relocation | None:
        """Return the move of one of the `sequences` that run on the slow worker `source`; None when none is possible.

        The `NUM_TARGETS` fastest workers where the ITL would be shorter by `min_gain` are tried, the fastest first,
        without those in `busy`. A sequence may move to such a worker if the worker serves its lane and has room for it,
        and the move is short compared to the time of the tokens that it may still sample. The first worker to which any
        sequence may move is the target. Of these sequences, the one with the least KV in the least urgent lane moves.
        `excluded`: as for `slow_workers`.
        """
        for target, target_s in islice(self._targets(source, excluded, busy), NUM_TARGETS):
            able = [one for one in sequences if self._is_worthwhile(source, target, one) and _may_run(target, one)]
            if able:
                one = min(able, key=lambda one: (-one.lane, one.num_context, one.key))
                before_ms, after_ms = 1e3 * source.itl_s, 1e3 * target_s
                why = f"predicted inter-token latency before {before_ms:.1f} ms, after {after_ms:.1f} ms"
                return Relocation(one.key, source.view.ref, target.ref, "slow", why)
        return None

    def has_free_seat(self, view: WorkerView) -> bool:
        """Return whether a worker that decodes would begin another sequence at once. That is so if a seat is free, no
        sequence waits there, and the predicted ITL with the new sequence stays within the shortest ITL target of the
        lanes that the worker decodes."""
        if not view.decodes or view.load.num_waiting or view.num_to_decode >= view.max_num_seqs:
            return False
        targets_s = [self.targets_s[lane] for lane in _decoded_lanes(view) if lane in self.targets_s]
        if view.step_cost is None or not targets_s:
            return True
        return _DecodeWorker(view, view.step_cost).itl_s(view.step_cost, 1) <= min(targets_s)

    def plan_resume(self, source: WorkerView, one: MovableSequence, free: Iterable[WorkerView]) -> Relocation | None:
        """Return the move of the sequence `one`, which was preempted on the worker `source`, to a worker where it goes
        on; None where there is none.

        `free`: decode workers with a free seat. Of those that can use the KV of `source`, would accept the sequence and
        have room for it, the least loaded one is the target.
        """
        able = [view for view in free if _may_take_over(source, view, one)]
        if not able:
            return None
        return Relocation(one.key, source.ref, min(able, key=decode_cost).ref, "preempted", "it was preempted")

    def plan_leave(self, source: WorkerView, one: MovableSequence, free: Iterable[WorkerView]) -> Relocation | None:
        """Return the move of the sequence `one`, which decodes on the prefill worker `source`, to another worker; None
        where it should stay.

        `free`: decode workers with a free seat, the preferred ones first. Those that cannot use the KV of `source` are
        skipped, and the next `NUM_TARGETS` are examined. The first of these that serves the lane of the sequence and
        has room for it is the target. None where none of them does, or where so few tokens are left that the move would
        not pay.
        """
        if MAX_MOVE_SHARE * one.num_left < HANDOVER_STEPS:
            return None
        alike = (view for view in free if _is_alike(source, view))
        target = next((view.ref for view in islice(alike, NUM_TARGETS) if _may_run(view, one)), None)
        why = "its worker computes prompts only"
        return None if target is None else Relocation(one.key, source.ref, target, "prompts_only", why)

    def _is_source(self, one: SlowWorker) -> bool:
        limits_s = [self.targets_s[lane] for lane in _decoded_lanes(one.view) if lane in self.targets_s]
        return one.view.load.num_running > 1 and (not limits_s or one.itl_s > min(limits_s))

    def _targets(
        self, source: SlowWorker, excluded: Set[Pair], busy: Set[WorkerRef] = frozenset()
    ) -> Iterator[tuple[WorkerView, float]]:
        """Yield pairs (worker, ITL in seconds), roughly by rising ITL: the workers on which a sequence of the average
        length on `source` would have an ITL shorter by `min_gain`. Workers in `busy`, and those to which nothing may
        move from `source` by `excluded`, are left out."""
        own, longest_s = source.view, source.itl_s * (1 - self.min_gain)
        lanes = _decoded_lanes(own)
        num_context = own.num_held_tokens // own.load.num_running
        for one in source.fastest:
            view = one.view
            if view.ref in busy or view.ref == own.ref or (own.ref, view.ref) in excluded:
                continue
            itl_s = one.itl_s(one.cost or source.cost, 1, num_context)
            if itl_s <= longest_s and not view.lanes.isdisjoint(lanes):
                yield view, itl_s
            elif one.cost is not None and one.itl_s(one.cost) > longest_s:
                return  # all further workers that have measured their steps are slower

    def _is_worthwhile(self, source: SlowWorker, target: WorkerView, one: MovableSequence) -> bool:
        copy_s = one.num_context * token_bytes(source.view) / self.links.bandwidth(source.view, target)
        return copy_s + HANDOVER_STEPS * source.itl_s <= MAX_MOVE_SHARE * one.num_left * source.itl_s


def _rank(worker: _DecodeWorker, usual: StepCost) -> tuple[bool, float]:
    """Return the sort key of possible targets: those that decode nothing first, then by rising ITL."""
    return worker.cost is not None, worker.itl_s(worker.cost or usual)


def _decoded_lanes(view: WorkerView) -> list[Lane]:
    return [lane for lane in Lane if not view.load.lane_seqs or view.load.lane_seqs[lane]]


def _is_alike(source: WorkerView, target: WorkerView) -> bool:
    return target.model == source.model and can_serve_prefix(source, target)


def _may_take_over(source: WorkerView, target: WorkerView, one: MovableSequence) -> bool:
    # The target computes the last block at least, and all of them where the source has reused the others.
    return _is_alike(source, target) and _may_run(target, one) and target.takes(one.num_context, one.lane)


def _may_run(target: WorkerView, one: MovableSequence) -> bool:
    return one.lane in target.lanes and target.has_room(one.num_context + min(one.num_left, EXPECTED_OUTPUT))
