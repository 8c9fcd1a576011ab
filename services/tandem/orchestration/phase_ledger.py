"""Divide the time of one request into stages; the caller passes the time.

By the gateway's clock the request is in one of seven consecutive phases, whose times always add up to its total, even
after failures. The reports of workers divide the phases FIRST (until the first token) and HANDOVER (the hand-off)
further. The part of these phases that the reports do not explain was spent between worker and gateway. Reports arrive
in any order, also after the phase has ended, because two workers report over two streams.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

from tandem.core.events import LaneYield, Pauses, Preemption, merged_yields
from tandem.core.ids import JobKey
from tandem.core.request_stages import JobStages, Stage, Wait, WaitCause, merged_waits

MAX_MOVES = 64
"""Most phase changes of one request that are stored with their times. The seconds of later changes are counted all the
same."""


_REMAINDERS = {
    Stage.QUEUE: WaitCause.TURN,
    Stage.PREFILL_QUEUE: WaitCause.STEP,
    Stage.TRANSFER: WaitCause.PULL,
    Stage.DECODE_QUEUE: WaitCause.STEP,
}
"""For each stage in which a request waits, in order: the cause to which those seconds of the stage count that no report
explains."""


class LedgerPhase(IntEnum):
    """Name the phases of a request at its gateway, in order; the values are list indices.

    FIRST: workers have the request, and its first token is awaited. HANDOVER (the hand-off): the first token has
    arrived, and the KV is on its way to the worker that samples the second. OVER: the request has ended, and time no
    longer counts. The other phases are the stages with the same names (`Stage`).
    """

    RECEIVE = 0
    QUEUE = 1
    ROUTE = 2
    FIRST = 3
    HANDOVER = 4
    DECODE = 5
    DELIVER = 6
    OVER = 7


class StageSeconds(NamedTuple):
    """Hold the seconds that one request spent in each stage; the fields are in the order of `Stage`."""

    receive: float = 0.0
    queue: float = 0.0
    route: float = 0.0
    prefill_queue: float = 0.0
    prefill: float = 0.0
    transfer: float = 0.0
    decode_queue: float = 0.0
    decode: float = 0.0
    deliver: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)

    def of(self, stage: Stage) -> float:
        value: float = getattr(self, stage.value)
        return value


class PhaseLedger:
    """Count how much time one request spends in each phase.

    Times are seconds of the gateway's clock; `began_at`: when the request arrived. `phase`: the current phase,
    read-only for callers. `moves`: the first `MAX_MOVES` phase changes, each with the phase that was entered and the
    time; read-only.
    """

    __slots__ = (
        "_job_stages", "_lost", "_preemptions", "_queue_waits", "_seconds", "_since", "began_at", "moves", "phase",
    )  # fmt: skip

    def __init__(self, began_at: float) -> None:
        self.began_at = began_at
        self._since = began_at
        self.phase = LedgerPhase.RECEIVE
        self._seconds = [0.0] * len(LedgerPhase)
        self._job_stages: dict[int, JobStages] = {}
        self._lost = [0.0] * len(LedgerPhase)
        self.moves: list[tuple[LedgerPhase, float]] = []
        self._preemptions: dict[tuple[JobKey, int], Preemption] = {}
        self._queue_waits: list[Wait] = []

    def move(self, phase: LedgerPhase, now: float) -> None:
        """Enter `phase` at the time `now`, and count the time since the last change for the phase that ends. Does
        nothing once the phase is OVER.

        When the request returns to the queue before it decodes, its time with the workers counts as prefill or
        transfer, because no worker will report on it.
        """
        if self.phase is LedgerPhase.OVER:
            return
        spent = max(0.0, now - self._since)
        if phase is LedgerPhase.QUEUE and self.phase in (LedgerPhase.FIRST, LedgerPhase.HANDOVER):
            self._lost[self.phase] += spent
        else:
            self._seconds[self.phase] += spent
        self.phase, self._since = phase, max(now, self._since)
        if len(self.moves) < MAX_MOVES:
            self.moves.append((phase, self._since))

    def worker_seconds(self, now: float) -> float:
        """Return for how many seconds workers had the request until `now`, over all attempts."""
        spent = sum(self._seconds[LedgerPhase.ROUTE : LedgerPhase.DELIVER]) + sum(self._lost)
        is_there = LedgerPhase.ROUTE <= self.phase < LedgerPhase.DELIVER
        return spent + max(0.0, now - self._since) if is_there else spent

    def add_job_stages(self, attempt: int, stages: JobStages) -> None:
        """Record how long a job was in each stage before its first sampled token, as its worker reports. `attempt`: the
        attempt number of the job.

        Of several reports on one attempt, the maximum of each stage counts: the job's choices wait in parallel, and the
        prefill and the decode job of an attempt report different stages.
        """
        known = self._job_stages.get(attempt, JobStages())
        waits = known.waits if set(stages.waits) <= set(known.waits) else known.waits + stages.waits
        self._job_stages[attempt] = JobStages.of(map(max, known.seconds, stages.seconds), waits)

    def add_queue_waits(self, waits: Iterable[Wait]) -> None:
        """Record for how many seconds the request waited in the queue for something other than its turn. `waits`: one
        entry for each cause."""
        self._queue_waits += waits

    def add_preemption(self, key: JobKey, index: int, preemption: Preemption) -> None:
        """Record the pauses of a choice, and the sequences that were preempted in its favour, before its output token
        at position `index`. `key`: the job and choice. A repeated report on the same token changes nothing."""
        self._preemptions.setdefault((key, index), preemption)

    @property
    def pauses(self) -> Pauses:
        """Return how often choices of the request were preempted and went on later, and the seconds for which they were
        paused, both summed over all choices."""
        return Pauses.sum(preemption.pauses for preemption in self._preemptions.values())

    @property
    def yields(self) -> tuple[LaneYield, ...]:
        """Return, for each lane, how many sequences were preempted in favour of this request, and how many tokens and
        KV blocks they gave up."""
        return merged_yields(each for preemption in self._preemptions.values() for each in preemption.yields)

    @property
    def waits(self) -> tuple[Wait, ...]:
        """Return the seconds that the request has waited until the last change of its phase, as one `Wait` for each
        stage and cause, in the order of the stages.

        The waits of a stage add up to its seconds, except for differences between the clocks of gateway and workers.
        """
        reported = [wait for stages in self._job_stages.values() for wait in stages.waits]
        known = merged_waits([*self._queue_waits, *reported])
        spent = self.seconds(self._since)
        found: list[Wait] = []
        for stage, cause in _REMAINDERS.items():
            waits = [wait for wait in known if wait.stage is stage]
            rest = Wait(stage, cause, max(0.0, spent.of(stage) - sum(wait.seconds for wait in waits)))
            found += [rest, *waits] if stage is Stage.QUEUE else [*waits, rest]
        return merged_waits(wait for wait in found if wait.seconds > 0)

    def seconds(self, now: float) -> StageSeconds:
        """Return the seconds of each stage up to `now`. They add up to the time from `began_at` until `now`, or until
        the end of the request if it has ended (phase OVER)."""
        spent = self._seconds.copy()
        if self.phase is not LedgerPhase.OVER:
            spent[self.phase] += max(0.0, now - self._since)
        receive, queue, route, first, handover, decode, deliver, _ = spent
        parts_of_jobs = [stages.seconds for stages in self._job_stages.values()]
        reported = JobStages.of(map(sum, zip(*parts_of_jobs, strict=True))) if parts_of_jobs else None
        if reported is not None:
            # A worker begins an accepted job while its acceptance is still on the way.
            begun = min(route, max(0.0, reported.prefill_queue_s + reported.prefill_s - first))
            route, first = route - begun, first + begun
        parts = [0.0, first] if reported is None else _clipped(first, reported.prefill_queue_s, reported.prefill_s)
        pulled = (
            [handover, 0.0, 0.0]
            if reported is None or not any(reported.seconds[2:])
            else _clipped(handover, reported.transfer_s, reported.decode_queue_s, reported.decode_s)
        )
        between = first + handover - sum(parts) - sum(pulled)
        return StageSeconds(
            receive=receive,
            queue=queue,
            route=route,
            prefill_queue=parts[0],
            prefill=parts[1] + self._lost[LedgerPhase.FIRST],
            transfer=pulled[0] + self._lost[LedgerPhase.HANDOVER],
            decode_queue=pulled[1],
            decode=pulled[2] + decode,
            deliver=deliver + max(0.0, between),
        )

    def __repr__(self) -> str:
        return f"<ledger in {self.phase.name}>"


def _clipped(room: float, *parts: float) -> list[float]:
    """Return each part limited to what the parts before it leave of `room`."""
    clipped = []
    for part in parts:
        clipped.append(min(part, room))
        room -= clipped[-1]
    return clipped
