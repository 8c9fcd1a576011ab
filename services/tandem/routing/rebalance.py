"""Choose running sequences that should move to another decode worker: because their inter-token latency (ITL) would be
much shorter there, because they were preempted, or because their worker only computes prompts now."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import islice

from tandem.core.ids import JobKey, WorkerRef
from tandem.core.lane import Lane
from tandem.core.step_cost import StepCost, StepFeatures
from tandem.routing.link_bandwidth import LinkBandwidth
from tandem.routing.remote_prefix import can_serve_prefix
from tandem.routing.routing_request import EXPECTED_OUTPUT
from tandem.routing.worker_view import Pair, WorkerView, decode_cost, token_bytes

HANDOVER_STEPS = 2
"""Steps of the source that a move costs besides the copy of the KV: the last token there and the first one on the
target."""
MAX_MOVE_SHARE = 0.1
"""A sequence moves only if its move takes at most this fraction of the time that its remaining tokens may take."""
NUM_TARGETS = 4
"""Fastest workers that are tried as targets of one move."""


@dataclass(frozen=True, slots=True)
class MovableSequence:
    """A running sequence that may move: its KV of `num_context` tokens, and the `num_left` tokens that it may still
    sample."""

    key: JobKey
    lane: Lane
    num_context: int
    num_left: int


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """A sequence that should move from `source` to `target`, with the predicted ITL in seconds on `source` now and on
    `target` after the move."""

    key: JobKey
    source: WorkerRef
    target: WorkerRef
    source_itl_s: float
    target_itl_s: float

    @property
    def why(self) -> str:
        before_ms, after_ms = 1e3 * self.source_itl_s, 1e3 * self.target_itl_s
        return f"predicted inter-token latency before {before_ms:.1f} ms, after {after_ms:.1f} ms"


@dataclass(frozen=True, slots=True)
class PlannedResume:
    """A sequence that was preempted on `source` and should go on at `target`."""

    key: JobKey
    source: WorkerRef
    target: WorkerRef

    @property
    def why(self) -> str:
        return "it was preempted"


@dataclass(frozen=True, slots=True)
class PlannedLeave:
    """A sequence that decodes on `source`, whose role is to compute prompts only, and should go on at `target`."""

    key: JobKey
    source: WorkerRef
    target: WorkerRef

    @property
    def why(self) -> str:
        return "its worker computes prompts only"


Relocation = PlannedMove | PlannedResume | PlannedLeave


@dataclass(frozen=True, slots=True)
class _DecodeWorker:
    """A worker and its step costs. `cost`: None where it decodes nothing or has not reported its costs, because then it
    has not measured a decode step lately."""

    view: WorkerView
    cost: StepCost | None

    def itl_s(self, cost: StepCost, num_more: int = 0, num_context: int = 0) -> float:
        """Return the predicted seconds of a decode step with `num_more` more sequences of `num_context` tokens each.

        Sequences that wait or are on their way count, because they decode soon.
        """
        context = self.view.num_held_tokens + num_more * num_context
        num_seqs = self.view.num_to_decode + num_more
        return cost.predict(StepFeatures(num_decode_seqs=num_seqs, decode_context=context))


@dataclass(frozen=True, slots=True)
class SlowWorker:
    """A decode worker from which a sequence should move. `itl_s`: its predicted ITL in seconds. `fastest`: workers of
    the same model build, by rising ITL."""

    view: WorkerView
    cost: StepCost
    itl_s: float
    fastest: Sequence[_DecodeWorker]


@dataclass(frozen=True, slots=True)
class Rebalancing:
    """Settings for moves. `targets_s`: the ITL targets of the lanes that have one, in seconds. `min_gain`: the fraction
    of its ITL by which a move must shorten the ITL of a sequence; a sequence that has moved does not move back, unless
    several gateways move sequences at the same time. `links`: measured bandwidths, which may change later."""

    targets_s: Mapping[Lane, float]
    min_gain: float
    links: LinkBandwidth

    def slow_workers(self, workers: Iterable[WorkerView], excluded: Set[Pair] = frozenset()) -> list[SlowWorker]:
        """Return the workers from which a sequence of average length should move, greatest ITL first.

        Each of them has at least two running sequences, and its ITL exceeds the shortest target of the lanes that it
        decodes, if they have any. Pairs (source, target) in `excluded` are not used.
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
    ) -> PlannedMove | None:
        """Return the move of one of the `sequences` that run on a slow worker; None when none is possible.

        The target is the fastest worker that is not `busy`, serves the lane of a sequence and has room for it. Of the
        sequences that may go there, that of the least urgent lane with the least KV moves.
        """
        for target, target_s in islice(self._targets(source, excluded, busy), NUM_TARGETS):
            able = [one for one in sequences if self._is_worthwhile(source, target, one) and _may_run(target, one)]
            if able:
                one = min(able, key=lambda one: (-one.lane, one.num_context, one.key))
                return PlannedMove(one.key, source.view.ref, target.ref, source.itl_s, target_s)
        return None

    def has_free_seat(self, view: WorkerView) -> bool:
        """Return whether a decode worker would begin another sequence at once: a seat is free, nothing waits there, and
        its predicted ITL stays within the shortest target of its lanes."""
        if not view.decodes or view.load.num_waiting or view.num_to_decode >= view.max_num_seqs:
            return False
        targets_s = [self.targets_s[lane] for lane in _decoded_lanes(view) if lane in self.targets_s]
        if view.step_cost is None or not targets_s:
            return True
        return _DecodeWorker(view, view.step_cost).itl_s(view.step_cost, 1) <= min(targets_s)

    def resume_target(self, source: WorkerView, one: MovableSequence, free: Iterable[WorkerView]) -> WorkerRef | None:
        """Return the worker at which a sequence goes on that was preempted on `source`: the least loaded of `free`,
        which have a seat, with room for it; None where there is none."""
        able = [view for view in free if _may_take_over(source, view, one)]
        return min(able, key=decode_cost).ref if able else None

    def leave_target(self, source: WorkerView, one: MovableSequence, free: Iterable[WorkerView]) -> WorkerRef | None:
        """Return the worker at which a sequence goes on that decodes on a worker for prompts: the first of `free`,
        which have a seat, with room for it; None where the first `NUM_TARGETS` have none, or where the sequence ends
        too soon to move."""
        if MAX_MOVE_SHARE * one.num_left < HANDOVER_STEPS:
            return None
        alike = (view for view in free if _is_alike(source, view))
        return next((view.ref for view in islice(alike, NUM_TARGETS) if _may_run(view, one)), None)

    def _is_source(self, one: SlowWorker) -> bool:
        limits_s = [self.targets_s[lane] for lane in _decoded_lanes(one.view) if lane in self.targets_s]
        return one.view.load.num_running > 1 and (not limits_s or one.itl_s > min(limits_s))

    def _targets(
        self, source: SlowWorker, excluded: Set[Pair], busy: Set[WorkerRef] = frozenset()
    ) -> Iterator[tuple[WorkerView, float]]:
        """Yield the workers on which a sequence of average length would be faster by `min_gain`, and its ITL there,
        about by rising ITL."""
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
    load = target.load
    if one.lane not in target.lanes:
        return False
    if not load.num_blocks:
        return True
    num_tokens = one.num_context + min(one.num_left, EXPECTED_OUTPUT)
    num_blocks = -(-num_tokens // target.block_size)
    return num_blocks * (1 + target.num_inflight) <= load.num_free_blocks - load.num_reserved_blocks
