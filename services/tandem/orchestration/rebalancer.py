"""Decide which running sequences of one gateway move to other decode workers, and follow each move to its end.
Sequences on slow workers move to faster ones. Preempted sequences, and those on workers that only compute prompts now,
move to workers with room."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from heapq import nsmallest
from operator import itemgetter
from zlib import crc32

from tandem.core.ids import JobKey, RequestId, WorkerRef
from tandem.core.lane import Lane
from tandem.core.request import ResumeJob
from tandem.orchestration.commands import MoveOutcome, ReportMove
from tandem.orchestration.request_state import RequestState
from tandem.routing.rebalance import MovableSequence, Rebalancing, Relocation, SlowWorker
from tandem.routing.worker_ranking import WorkerRanking
from tandem.routing.worker_view import Pair, WorkerView, decode_cost

PERIOD_S = 0.1
"""Seconds between two comparisons of the decode workers."""
PAUSE_S = 0.3
"""Seconds for which a preempted sequence waits on its worker before it may move, because most pauses are shorter."""
MAX_EXAMINED = 64
"""Most preempted sequences for which one call of `plan_resumes` searches for a worker, and most sequences for which one
call of `plan_leaves` does. A sequence without a target is tried again after `HOLD_S`."""
HOLD_S = 1.0
"""Seconds for which a worker must be slow before its first sequence moves, so that a short burst moves nothing. The
same time passes before a slow worker from which no sequence could move is examined again, and between two searches for
sequences that leave workers for prompts, while no such move is under way."""
RETRY_S = 0.3
"""Seconds until a slow worker from which no sequence could move is examined again, while other workers have moves that
have not ended."""
STUCK_S = 30.0
"""Seconds after which two workers with an unfinished move may move other sequences."""
MOVE_TIMEOUT_S = 5.0
"""Seconds within which a worker must offer the KV of a sequence that is to move. A move without an offer is then given
up, so that another sequence may move."""
FIRST_BACKOFF_S = 10.0
LONGEST_BACKOFF_S = 160.0
"""First and longest time, in seconds, for which a pair of workers is not used after a move between them was withdrawn.
The time doubles with each withdrawn move, unless the pair was usable for as long before."""


@dataclass(frozen=True, slots=True)
class _Backoff:
    until: float
    length_s: float


@dataclass(frozen=True, slots=True)
class _OpenMove:
    planned: Relocation
    begun_at: float


@dataclass(slots=True)
class _Preemption:
    """A preempted choice, which has waited on its worker since the time `since`; its next output token has the index
    `next_index`.

    `tried_at`: when a worker on which it could go on was last searched for in vain.
    """

    key: JobKey
    worker: WorkerRef
    next_index: int
    since: float
    tried_at: float = -math.inf


class Rebalancer:
    """Plan moves of running sequences to other decode workers. Each worker takes part in one move at a time, as source
    or target.

    Each gateway moves its own requests only. Where a slow worker decodes for several gateways, each of them moves
    sequences at a rate in proportion to its part of the worker's sequences, and begins at a different time, so that
    together they move about one per `PERIOD_S`. `ranking`: the workers that the gateway knows. `rules`: chooses
    sequences and targets. A request that was retried or moved `max_moves` times stays.

    The caller begins the moves that the `plan` methods return; each of them is followed until `ended` returns its
    outcome. With `only_advises` the moves are only advice: that of `plan` and `plan_leaves` is repeated every `HOLD_S`
    seconds, that of `plan_resumes` is given once for each preemption.
    """

    def __init__(
        self, ranking: WorkerRanking, rules: Rebalancing, max_moves: int, *, only_advises: bool = False
    ) -> None:
        self._rules = rules
        self._ranking = ranking
        self._max_moves = max_moves
        self._only_advises = only_advises
        self._moves: dict[Pair, _OpenMove] = {}
        self._next_at: dict[WorkerRef, float] = {}
        """For each slow worker, when a sequence may move away from it next."""
        self._begun: set[WorkerRef] = set()
        """Slow workers for which the time of this gateway's first move was chosen."""
        self._backoffs: dict[Pair, _Backoff] = {}
        self._resting_until: dict[Pair, float] = {}
        """Pairs (source, target) of which the target has refused a preempted sequence, and until when nothing moves."""
        self._preempted: dict[tuple[RequestId, int], _Preemption] = {}
        """Choices that wait on the worker that preempted them, by request and choice."""
        self._kept_until: dict[JobKey, float] = {}
        """Sequences that could not leave a worker for prompts, and when they are tried again; others go before them."""
        self._due_at = self._leaves_due_at = 0.0

    def is_due(self, now: float) -> bool:
        """Return whether `PERIOD_S` seconds have passed since the last call of `plan`."""
        return now >= self._due_at

    def plan(self, requests: Iterable[RequestState], failing: Set[WorkerRef], now: float) -> list[Relocation]:
        """Return the moves to begin now from slow decode workers to faster ones.

        `requests`: the open requests of this gateway that may move. `failing`: workers that are neither source nor
        target, because their jobs keep failing. `now`: seconds of one clock.
        """
        self._due_at = now + PERIOD_S
        excluded = self._excluded(now)
        slow = self._rules.slow_workers(self._ranking.without(failing).views(), excluded)
        self._next_at = {one.view.ref: self._next_at.get(one.view.ref, now + HOLD_S) for one in slow}
        self._begun &= self._next_at.keys()
        busy = self._busy(now)
        # The one that has waited longest goes first, because several may want to use the same target.
        slow.sort(key=lambda one: self._next_at[one.view.ref])
        due = {one.view.ref: one for one in slow if now >= self._next_at[one.view.ref] and one.view.ref not in busy}
        moves: list[Relocation] = []
        unusable = excluded | self._moves.keys()
        for source, sequences in self._sequences(requests, due.keys()).items():
            turn_s = _turn_s(due[source], sequences)
            if source not in self._begun and sequences:
                self._begun.add(source)
                share = crc32(sequences[0].key.request.encode()) / 2**32
                self._next_at[source] = now + (turn_s - PERIOD_S) * share
            if source in busy or now < self._next_at[source]:
                continue
            move = self._rules.plan(due[source], sequences, busy, unusable)
            if move is None:
                self._next_at[source] = now + (RETRY_S if busy else HOLD_S)
                continue
            moves.append(move)
            busy |= {move.source, move.target}
            self._next_at[source] = now + (HOLD_S if self._only_advises else turn_s)
        return self._follow(moves, now)

    def preempted(self, key: JobKey, next_index: int, worker: WorkerRef, now: float) -> None:
        """Record that `worker` has preempted a choice at the time `now`. `key`: the key of the choice in its job there.
        `next_index`: the index of the next output token of the choice. A repeated report changes nothing."""
        choice = key.request, key.choice
        known = self._preempted.get(choice)
        if known is None or (known.key, known.next_index) != (key, next_index):
            self._preempted[choice] = _Preemption(key, worker, next_index, now)

    def taken_over(self, key: JobKey, now: float) -> tuple[JobKey, int, float] | None:
        """Return how long a preempted choice has paused, and forget the preemption, because a job on another worker
        continues the choice. `key`: the key of the choice in the new job.

        The result has three parts: the key of the choice in the job that was preempted, the index of its next output
        token at that time, and the seconds from the preemption until `now`. Returns None, and forgets nothing, where no
        preemption of the choice is known, or where `key` belongs to the preempted job itself.
        """
        one = self._preempted.get((key.request, key.choice))
        if one is None or one.key.attempt == key.attempt:
            return None
        del self._preempted[key.request, key.choice]
        return one.key, one.next_index, now - one.since

    def plan_resumes(
        self, open_requests: Mapping[RequestId, RequestState], excluded: Set[WorkerRef], now: float
    ) -> list[Relocation]:
        """Return the moves, to begin now, by which preempted choices go on at workers with room. A choice may move once
        it has waited for `PAUSE_S` seconds on the worker that preempted it. The most urgent lane comes first, and
        within a lane the choice that has waited longest.

        `open_requests`: the open requests of this gateway, by id. `excluded`: workers to which nothing moves. Preempted
        choices that have gone on or ended are forgotten.
        """
        due: list[tuple[Lane, float, _Preemption]] = []
        for choice, one in list(self._preempted.items()):
            state = open_requests.get(one.key.request)
            next_index = None if state is None else state.next_index(one.key)
            if state is None or next_index is None or next_index > one.next_index:
                del self._preempted[choice]
            elif now >= max(one.since + PAUSE_S, one.tried_at + HOLD_S) and next_index == one.next_index:
                due.append((state.request.lane, one.since, one))
        moves: list[Relocation] = []
        if not due:
            return moves
        busy, unusable = self._busy(now), self._excluded(now) | self._moves.keys()
        seated = [view for view in self._ranking.without(excluded).views() if self._rules.has_free_seat(view)]
        free = {
            source: [view for view in seated if view.ref not in busy and (source, view.ref) not in unusable]
            for source in {one.worker for _, _, one in due} - busy
        }
        able = (entry for entry in due if free.get(entry[2].worker))
        for _, _, one in nsmallest(MAX_EXAMINED, able, key=itemgetter(0, 1)):
            if one.worker in busy:
                continue
            left = [view for view in free[one.worker] if view.ref not in busy]
            move = self._resume(one, open_requests[one.key.request], left)
            if move is None:
                one.tried_at = now
                continue
            moves.append(move)
            busy |= {move.source, move.target}
            if self._only_advises:
                del self._preempted[one.key.request, one.key.choice]
        return self._follow(moves, now)

    def plan_leaves(self, requests: Iterable[RequestState], excluded: Set[WorkerRef], now: float) -> list[Relocation]:
        """Return the moves, to begin now, by which sequences leave prefill workers and go on at workers with room. The
        most urgent lane comes first, and each prefill worker is the source of at most one move at a time. Sequences
        decode on a prefill worker after its role was changed, or because no other worker had room.

        `requests`: the open requests of this gateway that may move. `excluded`: workers to which nothing moves.
        Preempted choices are left to `plan_resumes`."""
        moves: list[Relocation] = []
        if now < self._leaves_due_at:
            return moves
        self._leaves_due_at = now + HOLD_S
        self._kept_until = {key: until for key, until in self._kept_until.items() if until > now}
        busy = self._busy(now)
        leavable = (view for view in self._ranking.views() if not view.decodes and view.load.num_running)
        sources = {view.ref: view for view in leavable if view.ref not in busy}
        leaving = [
            (one.lane, one.num_context, one.key, source, one)
            for source, sequences in self._sequences(requests, sources.keys()).items()
            for one in sequences
            if one.key not in self._kept_until and (one.key.request, one.key.choice) not in self._preempted
        ]
        if not leaving:
            return moves
        unusable = self._excluded(now) | self._moves.keys()
        seated = [view for view in self._ranking.without(excluded).views() if self._rules.has_free_seat(view)]
        seated.sort(key=decode_cost)
        # Those without a worker to go to must not keep the others from being examined.
        kinds = {(view.model, view.fingerprint) for view in seated}
        able = (entry for entry in leaving if (sources[entry[3]].model, sources[entry[3]].fingerprint) in kinds)
        for *_, source, one in nsmallest(MAX_EXAMINED, able):
            if source in busy:
                continue
            free = (view for view in seated if view.ref not in busy and (source, view.ref) not in unusable)
            move = self._rules.plan_leave(sources[source], one, free)
            if move is not None:
                moves.append(move)
                busy |= {move.source, move.target}
        return self._follow(moves, now)

    def _follow(self, moves: list[Relocation], now: float) -> list[Relocation]:
        """Record moves that the caller begins now, and return them. Records nothing where they are only advice."""
        if not self._only_advises:
            self._moves |= {(move.source, move.target): _OpenMove(move, now) for move in moves}
        return moves

    def _resume(self, one: _Preemption, state: RequestState, free: list[WorkerView]) -> Relocation | None:
        source = self._ranking.find(state.request.model, one.worker)
        if source is None or state.num_retries >= self._max_moves:
            return None
        for sequence in state.movable(one.worker):
            if sequence.key == one.key:
                return self._rules.plan_resume(source, sequence, free)
        return None

    def ended(self, open_requests: Mapping[RequestId, RequestState], now: float) -> list[ReportMove]:
        """Return the outcomes of the moves that have ended since the last call, and forget these moves.
        `open_requests`: the open requests of this gateway, by id."""
        reports: list[ReportMove] = []
        for pair, move in list(self._moves.items()):
            outcome = _outcome(move, open_requests.get(move.planned.key.request), now)
            if outcome is None:
                continue
            del self._moves[pair]
            if move.planned.reason == "prompts_only":
                self._leaves_due_at = now  # the next one may leave
                if outcome is MoveOutcome.WITHDRAWN:
                    self._kept_until[move.planned.key] = now + FIRST_BACKOFF_S
            if outcome is MoveOutcome.MOVED:
                self._backoffs.pop(pair, None)
                if move.planned.reason == "preempted":
                    outcome = MoveOutcome.RESUMED
            elif outcome is MoveOutcome.WITHDRAWN and move.planned.reason == "preempted":
                self._resting_until[pair] = now + HOLD_S
            elif outcome is MoveOutcome.WITHDRAWN:
                before = self._backoffs.get(pair)
                length_s = FIRST_BACKOFF_S
                if before is not None and now < before.until + before.length_s:
                    length_s = min(2 * before.length_s, LONGEST_BACKOFF_S)
                self._backoffs[pair] = _Backoff(now + length_s, length_s)
            reports.append(ReportMove(move.planned, outcome))
        return reports

    def forget(self, worker: WorkerRef) -> None:
        """Remove the back-off times of all pairs with `worker`, because the worker is gone."""
        self._backoffs = {pair: backoff for pair, backoff in self._backoffs.items() if worker not in pair}

    def _excluded(self, now: float) -> Set[Pair]:
        """Return the pairs of workers (source, target) between which no sequence may move now."""
        self._resting_until = {pair: until for pair, until in self._resting_until.items() if until > now}
        resting = {pair for pair, backoff in self._backoffs.items() if backoff.until > now}
        return self._ranking.unlinked | resting | self._resting_until.keys()

    def _busy(self, now: float) -> set[WorkerRef]:
        """Return the workers with a move that has not ended, unless it is stuck."""
        return {ref for pair, move in self._moves.items() if now < move.begun_at + STUCK_S for ref in pair}

    def _sequences(
        self, requests: Iterable[RequestState], sources: Set[WorkerRef]
    ) -> dict[WorkerRef, list[MovableSequence]]:
        """Return the sequences of this gateway that may move away from each of the workers `sources`, by worker, in the
        order of `sources`."""
        found: dict[WorkerRef, list[MovableSequence]] = {source: [] for source in sources}
        for state in requests if found else ():
            if state.num_retries < self._max_moves:
                for worker in state.workers():
                    if worker in found:
                        found[worker] += state.movable(worker)
        return found


def _turn_s(source: SlowWorker, sequences: list[MovableSequence]) -> float:
    """Return the seconds between two moves of this gateway from the slow worker `source`: `PERIOD_S` where all
    sequences there are this gateway's, longer in proportion where others have some."""
    return PERIOD_S * max(1.0, source.view.load.num_running / max(1, len(sequences)))


def _outcome(move: _OpenMove, state: RequestState | None, now: float) -> MoveOutcome | None:
    """Return how a move has ended, or None while it has not. A move whose sequence was not offered within
    `MOVE_TIMEOUT_S` seconds is given up, and the sequence stays."""
    key = move.planned.key
    group = None if state is None else state.attempts.of(key.choice)
    if state is None or group is None:
        return MoveOutcome.ENDED
    if group.target is not None:
        if group.source is not None or now - move.begun_at < MOVE_TIMEOUT_S:
            return None
        state.attempts.give_up_move(key.choice)
        return MoveOutcome.WITHDRAWN
    for work in group.works:
        if work.worker == move.planned.target and isinstance(work.job, ResumeJob) and work.job.offer_attempt:
            return MoveOutcome.MOVED
    is_there = any(w.worker == move.planned.source and w.job.attempt == key.attempt for w in group.works)
    return MoveOutcome.WITHDRAWN if is_there else MoveOutcome.ENDED
