"""Decide which running sequences of one gateway move to faster decode workers, and follow each move to its end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Protocol
from zlib import crc32

from tandem.core.config import GatewayConfig
from tandem.core.ids import RequestId, WorkerRef
from tandem.core.lane import Lane
from tandem.core.request import ResumeJob
from tandem.orchestration.commands import MoveOutcome, ReportMove
from tandem.orchestration.request_state import RequestState
from tandem.routing.link_bandwidth import LinkBandwidth
from tandem.routing.rebalance import MovableSequence, PlannedMove, Rebalancing, SlowWorker
from tandem.routing.worker_ranking import WorkerRanking
from tandem.routing.worker_view import Pair
from tandem.sched.state.slo_targets import LatencyTargets

PERIOD_S = 0.1
"""Seconds between two comparisons of the decode workers."""
HOLD_S = 1.0
"""Seconds for which a worker must be slow before its first sequence moves, so that a short burst moves nothing. It is
also the time until a slow worker is examined again from which nothing could move."""
RETRY_S = 0.3
"""Seconds until a slow worker is examined again from which nothing could move while others moved sequences."""
STUCK_S = 30.0
"""Seconds after which two workers with an unfinished move may move other sequences."""
MOVE_TIMEOUT_S = 5.0
"""Seconds within which a worker must offer a sequence that is to move; later another one may move."""
FIRST_BACKOFF_S = 10.0
LONGEST_BACKOFF_S = 160.0
"""Seconds until a pair of workers between which a move was withdrawn is used again. They double each time, unless the
pair was usable for as long before."""


class HasState(Protocol):
    """Give the state of an open request, as the director's `OpenRequest` does."""

    @property
    def state(self) -> RequestState: ...


@dataclass(frozen=True, slots=True)
class _Backoff:
    until: float
    length_s: float


@dataclass(frozen=True, slots=True)
class _OpenMove:
    planned: PlannedMove
    begun_at: float


class Rebalancer:
    """Plan moves of running sequences between decode workers: for each worker one move at a time, in or out.

    Each gateway moves its own requests only. Of a worker that decodes for several gateways each moves sequences in
    proportion to its part of them, and begins at a different time, so that together they move about one per `PERIOD_S`.
    `ranking` and `links`: what the gateway knows of workers. The caller begins the moves that `plan` returns and asks
    for the ended ones with `ended`.
    """

    def __init__(
        self, ranking: WorkerRanking, links: LinkBandwidth, config: GatewayConfig, targets: LatencyTargets
    ) -> None:
        targets_s = {lane: target_s for lane in Lane if (target_s := targets.lane(lane).itl_s) > 0}
        self._rules = Rebalancing(targets_s, config.rebalance_min_gain, links)
        self._ranking = ranking
        self._max_moves = config.rebalance_max_moves
        self._moves: dict[Pair, _OpenMove] = {}
        self._next_at: dict[WorkerRef, float] = {}
        """When a sequence of each slow worker may move next."""
        self._begun: set[WorkerRef] = set()
        """Slow workers of which the first turn of this gateway was chosen."""
        self._backoffs: dict[Pair, _Backoff] = {}
        self._due_at = 0.0

    def is_due(self, now: float) -> bool:
        """Return whether `PERIOD_S` seconds have passed since the last `plan`."""
        return now >= self._due_at

    def plan(
        self, requests: Iterable[HasState], failing: Set[WorkerRef], now: float, *, is_begun: bool
    ) -> list[PlannedMove]:
        """Return the moves to begin now.

        `requests`: the open requests of this gateway that may move. `failing`: workers that get none. `is_begun`: the
        caller begins the moves, which are then followed until `ended` returns them; otherwise they are advice, which is
        repeated every `HOLD_S` seconds.
        """
        self._due_at = now + PERIOD_S
        resting = {pair for pair, backoff in self._backoffs.items() if backoff.until > now}
        excluded = self._ranking.unlinked | resting
        slow = self._rules.slow_workers(self._ranking.without(failing).decoding(), excluded)
        self._next_at = {one.view.ref: self._next_at.get(one.view.ref, now + HOLD_S) for one in slow}
        self._begun &= self._next_at.keys()
        busy = {ref for pair, move in self._moves.items() if now < move.begun_at + STUCK_S for ref in pair}
        # The one that has waited longest goes first, because several may want to use the same target.
        slow.sort(key=lambda one: self._next_at[one.view.ref])
        due = {one.view.ref: one for one in slow if now >= self._next_at[one.view.ref] and one.view.ref not in busy}
        moves: list[PlannedMove] = []
        for source, sequences in self._sequences(requests, due.keys()).items():
            if source not in self._begun and sequences:
                self._begun.add(source)
                first_s = _turn_s(due[source], sequences) - PERIOD_S
                self._next_at[source] = now + first_s * crc32(sequences[0].key.request.encode()) / 2**32
            if source in busy or now < self._next_at[source]:
                continue
            move = self._rules.plan(due[source], sequences, busy, excluded | self._moves.keys())
            if move is not None:
                moves.append(move)
                busy |= {move.source, move.target}
                self._next_at[source] = now + (_turn_s(due[source], sequences) if is_begun else HOLD_S)
            else:
                self._next_at[source] = now + (RETRY_S if busy else HOLD_S)
            if move is not None and is_begun:
                self._moves[move.source, move.target] = _OpenMove(move, now)
        return moves

    def ended(self, open_requests: Mapping[RequestId, HasState], now: float) -> list[ReportMove]:
        """Return the outcomes of moves that have ended since the last call, and forget the moves."""
        reports: list[ReportMove] = []
        for pair, move in list(self._moves.items()):
            outcome = _outcome(move, open_requests.get(move.planned.key.request), now)
            if outcome is None:
                continue
            del self._moves[pair]
            if outcome is MoveOutcome.MOVED:
                self._backoffs.pop(pair, None)
            elif outcome is MoveOutcome.WITHDRAWN:
                before = self._backoffs.get(pair)
                length_s = FIRST_BACKOFF_S
                if before is not None and now < before.until + before.length_s:
                    length_s = min(2 * before.length_s, LONGEST_BACKOFF_S)
                self._backoffs[pair] = _Backoff(now + length_s, length_s)
            reports.append(ReportMove(move.planned, outcome))
        return reports

    def forget(self, worker: WorkerRef) -> None:
        """Remove the back-off times of a worker that is gone."""
        self._backoffs = {pair: backoff for pair, backoff in self._backoffs.items() if worker not in pair}

    def _sequences(
        self, requests: Iterable[HasState], sources: Set[WorkerRef]
    ) -> dict[WorkerRef, list[MovableSequence]]:
        """Return the sequences of this gateway that may move from each of the workers, in the order of `sources`."""
        found: dict[WorkerRef, list[MovableSequence]] = {source: [] for source in sources}
        for request in requests if found else ():
            state = request.state
            if state.num_retries < self._max_moves:
                for worker in state.workers():
                    if worker in found:
                        found[worker] += state.movable(worker)
        return found


def _turn_s(source: SlowWorker, sequences: list[MovableSequence]) -> float:
    """Return the seconds between two moves of this gateway from one worker: `PERIOD_S` where all sequences there are
    its own."""
    return PERIOD_S * max(1.0, source.view.load.num_running / max(1, len(sequences)))


def _outcome(move: _OpenMove, request: HasState | None, now: float) -> MoveOutcome | None:
    """Return how a move has ended, or None while it has not. A sequence that was not offered in time stays."""
    key = move.planned.key
    group = None if request is None else request.state.attempts.of(key.choice)
    if request is None or group is None:
        return MoveOutcome.ENDED
    if group.target is not None:
        if group.source is not None or now - move.begun_at < MOVE_TIMEOUT_S:
            return None
        request.state.attempts.give_up_move(key.choice)
        return MoveOutcome.WITHDRAWN
    for work in group.works:
        if work.worker == move.planned.target and isinstance(work.job, ResumeJob) and work.job.offer_attempt:
            return MoveOutcome.MOVED
    is_there = any(w.worker == move.planned.source and w.job.attempt == key.attempt for w in group.works)
    return MoveOutcome.WITHDRAWN if is_there else MoveOutcome.ENDED
