"""Count what the requests in a gateway's queue wait for, besides their turn.

Only the first request of a model and lane is tried, so what it waits for is all that is known. The others wait for
their turn, unless the first waits for something that would keep each of them waiting too.
"""

from __future__ import annotations

from collections.abc import Set

from tandem.core.ids import RequestId
from tandem.core.lane import Lane
from tandem.core.request_stages import Stage, Wait, WaitCause

_OF_ALL = (WaitCause.NO_WORKER, WaitCause.URGENT_LANES)
"""Causes for which all requests of a model and lane wait, and not only the first."""


class _LaneClock:
    """Time of the requests of one model and lane, by cause.

    `first`: the request that was tried last, and `cause` what it has waited for since `since`; None for both where
    there is none. `seconds`: by the causes in `_OF_ALL`, until `since`.
    """

    __slots__ = ("cause", "first", "seconds", "since")

    def __init__(self, now: float) -> None:
        self.first: RequestId | None = None
        self.cause: WaitCause | None = None
        self.since = now
        self.seconds = (0.0,) * len(_OF_ALL)


class QueueWaits:
    """Count the seconds for which each waiting request waited for something but its turn.

    Knows a request from `enter` until `take` or `forget`. A model and lane are passed as a pair.
    """

    def __init__(self) -> None:
        self._clocks: dict[tuple[str, Lane], _LaneClock] = {}
        self._entered: dict[RequestId, tuple[float, ...]] = {}
        self._no_room_s: dict[RequestId, float] = {}

    def enter(self, request: RequestId, model_lane: tuple[str, Lane], now: float) -> None:
        """Begin to count the waits of a request that enters the queue, or returns to it; does nothing where it waits
        already."""
        self._entered.setdefault(request, self._advanced(model_lane, now).seconds)

    def tried(self, request: RequestId, model_lane: tuple[str, Lane], cause: WaitCause, now: float) -> None:
        """Record that the first request of a model and lane waits for `cause` from `now` on."""
        clock = self._advanced(model_lane, now)
        clock.first, clock.cause = request, cause

    def take(self, request: RequestId, model_lane: tuple[str, Lane], now: float) -> tuple[Wait, ...]:
        """Return the waits of a request that leaves the queue for workers, and forget it."""
        clock = self._advanced(model_lane, now)
        clock.first = clock.cause = None
        entered, no_room_s = self._entered.pop(request, clock.seconds), self._no_room_s.pop(request, 0.0)
        spent = [after - before for before, after in zip(entered, clock.seconds, strict=True)]
        causes = zip((*_OF_ALL, WaitCause.NO_ROOM), (*spent, no_room_s), strict=True)
        return tuple(Wait(Stage.QUEUE, cause, seconds) for cause, seconds in causes if seconds > 0)

    def forget(self, request: RequestId) -> None:
        """Forget a request that has ended; does nothing where it does not wait."""
        self._entered.pop(request, None)
        self._no_room_s.pop(request, None)

    def requests(self) -> Set[RequestId]:
        """Return the known requests."""
        return self._entered.keys()

    def _advanced(self, model_lane: tuple[str, Lane], now: float) -> _LaneClock:
        """Return the clock of a model and lane after adding the time until `now`."""
        clock = self._clocks.get(model_lane)
        if clock is None:
            clock = self._clocks[model_lane] = _LaneClock(now)
        spent, clock.since = max(0.0, now - clock.since), max(now, clock.since)
        if clock.cause is WaitCause.NO_ROOM:
            if clock.first in self._entered:
                self._no_room_s[clock.first] = self._no_room_s.get(clock.first, 0.0) + spent
        elif clock.cause is not None:
            added = (spent if cause is clock.cause else 0.0 for cause in _OF_ALL)
            clock.seconds = tuple(map(sum, zip(clock.seconds, added, strict=True)))
        return clock
