"""Where one request's time goes, stage by stage; never reads a clock and never decides anything.

The gateway's clock says how long the request was in each of seven phases that follow each other, so that they add up to
its time whatever happens. Two of them are spent at workers, whose own word divides them further. What a worker's word
leaves of such a phase was spent between worker and gateway. Workers' words come in any order, also after the phase is
over, because two workers speak over two streams.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from tandem.core.request_stages import JobStages, Stage

MAX_MOVES = 64
"""Of one request, that are remembered one by one. All of them count."""


class LedgerPhase(IntEnum):
    """FIRST: workers have it, and the first token is waited for. HANDOVER: the first token is here, and its KV is on
    its way to whoever draws the second. OVER: nothing counts any more. The values are places in a list."""

    RECEIVE = 0
    QUEUE = 1
    ROUTE = 2
    FIRST = 3
    HANDOVER = 4
    DECODE = 5
    DELIVER = 6
    OVER = 7


class StageSeconds(NamedTuple):
    """Of one request, by stage; in the order of `Stage`."""

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
    """Times are seconds of the gateway's clock; `began_at`: when the request arrived. `phase` is to be read only: a
    property would cost too much where it is looked at for every token. `moves` are the first phases that it moved to,
    each with when, likewise."""

    __slots__ = ("_lost", "_seconds", "_since", "_told", "began_at", "moves", "phase")

    def __init__(self, began_at: float) -> None:
        self.began_at = began_at
        self._since = began_at
        self.phase = LedgerPhase.RECEIVE
        self._seconds = [0.0] * len(LedgerPhase)
        self._told: dict[int, JobStages] = {}
        self._lost = [0.0] * len(LedgerPhase)
        self.moves: list[tuple[LedgerPhase, float]] = []

    def move(self, phase: LedgerPhase, now: float) -> None:
        """The time since the last move was spent in the phase that ends. What an attempt had begun when the request
        goes back to the line is lost: no worker will tell of it."""
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

    def told(self, attempt: int, stages: JobStages) -> None:
        """What a job of an attempt tells with the first token that it draws. Its choices wait side by side, and of two
        jobs each tells its own part."""
        known = self._told.get(attempt, JobStages())
        self._told[attempt] = JobStages(*map(max, known, stages))

    def seconds(self, now: float) -> StageSeconds:
        """Up to now; they add up to the time since `began_at`, or to what that was when it was over."""
        spent = self._seconds.copy()
        if self.phase is not LedgerPhase.OVER:
            spent[self.phase] += max(0.0, now - self._since)
        receive, queue, route, first, handover, decode, deliver, _ = spent
        told = JobStages(*map(sum, zip(*self._told.values(), strict=True))) if self._told else None
        if told is not None:
            # A worker begins with what it has accepted, also while its word that it has is on its way.
            begun = min(route, max(0.0, told.prefill_queue_s + told.prefill_s - first))
            route, first = route - begun, first + begun
        parts = [0.0, first] if told is None else _clipped(first, told.prefill_queue_s, told.prefill_s)
        pulled = (
            [handover, 0.0, 0.0]
            if told is None or not any(told[2:])
            else _clipped(handover, told.transfer_s, told.decode_queue_s, told.decode_s)
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
    """As much of each, in order, as there is room for."""
    clipped = []
    for part in parts:
        clipped.append(min(part, room))
        room -= clipped[-1]
    return clipped
