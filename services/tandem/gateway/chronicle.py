"""What is noted of answers while they last, and the one record of each when it ends; never ends one and never looks
into a part."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from tandem.core.clock import Clock, wall_ns
from tandem.core.errors import TandemError
from tandem.core.lane import Lane
from tandem.flow.ledger import LedgerPhase, PhaseLedger, StageSeconds
from tandem.gateway.caller import Caller
from tandem.gateway.pace import Pace
from tandem.gateway.record import CANCELLED, FINISHED, INTERNAL, AnswerObserver, AnswerRecord
from tandem.gateway.usage import Usage
from tandem.sched.targets import NO_TARGETS, LatencyTargets

_log = logging.getLogger(__name__)
_NOTHING = Usage(0, 0, None)


class Way(Protocol):
    """How the request of one prompt went, or goes."""

    @property
    def path(self) -> str: ...

    @property
    def num_attempts(self) -> int: ...

    @property
    def workers(self) -> Sequence[str]: ...


class Asked(NamedTuple):
    """What an answer is asked for by its body: `endpoint` as in records."""

    endpoint: str
    lane: Lane
    is_streamed: bool


class Chronicles:
    """Of all answers of a gateway. `observers` are told in turn of each that has ended."""

    __slots__ = ("_observers", "_targets", "clock", "num_open")

    def __init__(
        self, clock: Clock, observers: Sequence[AnswerObserver] = (), targets: LatencyTargets = NO_TARGETS
    ) -> None:
        self.clock = clock
        self.num_open = 0
        self._observers = tuple(observers)
        self._targets = targets

    @contextmanager
    def admission(self, identity: str, asked: Asked, caller: Caller) -> Iterator[Chronicle]:
        """The chronicle of an answer whose body was read. A refusal ends it here; what is admitted ends it itself."""
        self.num_open += 1
        chronicle = Chronicle(self, identity, asked, caller, Pace(self.clock.now, self._targets.lane(asked.lane).itl_s))
        try:
            yield chronicle
        except BaseException as error:
            chronicle.end(error, _NOTHING, is_complete=False)
            raise

    def close(self, record: AnswerRecord) -> None:
        """Whoever looks at it fails alone."""
        self.num_open -= 1
        for observer in self._observers:
            try:
                observer.answered(record)
            except Exception:
                _log.exception("%r cannot take the record of %s", observer, record.id)


class Chronicle:
    """Of one answer. `model` is the name of what is served, empty until it was found; `ways` has one for each prompt
    that was admitted, in order."""

    __slots__ = ("_asked", "_caller", "_chronicles", "_is_open", "_ledgers", "id", "model", "pace", "ways")

    def __init__(self, chronicles: Chronicles, identity: str, asked: Asked, caller: Caller, pace: Pace) -> None:
        self.id = identity
        self.model = ""
        self.pace = pace
        self.ways: list[Way] = []
        self._chronicles = chronicles
        self._asked = asked
        self._caller = caller
        self._ledgers: list[PhaseLedger] = []
        self._is_open = True

    def ledger(self) -> PhaseLedger:
        """Of the next prompt's request."""
        self._ledgers.append(PhaseLedger(self._caller.came_at))
        return self._ledgers[-1]

    def stages(self) -> StageSeconds:
        """Up to now. Of several prompts those of the one that ended last, or has not: it waited least for others."""
        now = self._chronicles.clock.now()
        return min((ledger.seconds(now) for ledger in self._ledgers or [self.ledger()]), key=_delivering)

    @property
    def first_token_s(self) -> float | None:
        """From its arrival to when the first token left; None: it had none."""
        first_at = self.pace.first_at
        return None if first_at is None else first_at - self._caller.came_at

    def end(self, error: BaseException | None, usage: Usage, *, is_complete: bool) -> None:
        """Once; a second time nothing happens."""
        if not self._is_open:
            return
        self._is_open = False
        now = self._chronicles.clock.now()
        for ledger in self._ledgers:
            ledger.move(LedgerPhase.OVER, now)
        self._chronicles.close(self._record(error, usage, _outcome(error, is_complete), now))

    def _record(self, error: BaseException | None, usage: Usage, outcome: str, now: float) -> AnswerRecord:
        caller, total_s = self._caller, now - self._caller.came_at
        ledgers = self._ledgers or [self.ledger()]
        stages = [ledger.seconds(now) for ledger in ledgers]
        last = min(range(len(stages)), key=lambda index: _delivering(stages[index]))
        way = self.ways[last] if last < len(self.ways) else None
        path, why = _path(way.path if way is not None else "")
        return AnswerRecord(
            id=self.id,
            label=caller.request_id,
            trace="",
            endpoint=self._asked.endpoint,
            model=self.model,
            tenant=caller.tenant.id,
            lane=self._asked.lane.label,
            outcome=outcome,
            error=_message(error),
            path=path,
            reason=why if path else getattr(error, "reason", "") or "",
            num_attempts=max((way.num_attempts for way in self.ways), default=0),
            workers=() if way is None else tuple(way.workers),
            is_streamed=self._asked.is_streamed,
            usage=usage,
            came_at=wall_ns() / 1e9 - total_s,
            total_s=total_s,
            first_token_s=self.first_token_s,
            token_s=self.pace.mean_s,
            longest_gap_s=self.pace.longest_s,
            num_gaps=self.pace.num_gaps,
            num_late_gaps=self.pace.num_late,
            stages=stages[last],
        )


def _delivering(stages: StageSeconds) -> float:
    return stages.deliver


def _path(told: str) -> tuple[str, str]:
    """The path and why it was taken, of what clients are told."""
    path, *facts = told.split(";")
    return path, next((fact.removeprefix("reason=") for fact in facts if fact.startswith("reason=")), "")


def _outcome(error: BaseException | None, is_complete: bool) -> str:
    match error:
        case TandemError():
            return error.kind.value
        case Exception():
            return INTERNAL
        case _:
            return FINISHED if is_complete else CANCELLED


def _message(error: BaseException | None) -> str:
    match error:
        case TandemError():
            return error.message
        case Exception():
            return repr(error)
        case _:
            return ""
