"""Count the seconds for which requests in a gateway's queue wait for something other than their turn, by cause.

Only the first request of a model and lane is tried on workers, so only its cause is known. The others wait for their
turn, unless the cause of the first would keep each of them waiting too.
"""

from __future__ import annotations

from collections.abc import Set

from tandem.core.ids import RequestId
from tandem.core.lane import Lane
from tandem.core.request_stages import Stage, Wait, WaitCause

_OF_ALL = (WaitCause.NO_WORKER, WaitCause.URGENT_LANES)
"""Causes for which all requests of a model and lane wait, and not only the first."""


class _LaneClock:
    """Seconds for which the requests of one model and lane have waited, by cause.

    `first`: the request that was tried last; `cause`: what it has waited for since the time `since`; both None while no
    tried request waits. `seconds`: seconds until `since`, one entry for each cause in `_OF_ALL`.
    """

    __slots__ = ("cause", "first", "seconds", "since")

    def __init__(self, now: float) -> None:
        self.first: RequestId | None = None
        self.cause: WaitCause | None = None
        self.since = now
        self.seconds = (0.0,) * len(_OF_ALL)


class QueueWaits:
    """Count the seconds for which each waiting request waited for something other than its turn, by cause.

    The waits of a request are counted from `enter` until `take` or `forget`. `model_lane`: the request's model and
    lane. `now`: seconds of one clock.
    """

    def __init__(self) -> None:
        self._clocks: dict[tuple[str, Lane], _LaneClock] = {}
        self._entered: dict[RequestId, tuple[float, ...]] = {}
        self._no_room_s: dict[RequestId, float] = {}

    def enter(self, request: RequestId, model_lane: tuple[str, Lane], now: float) -> None:
        """Begin to count the waits of a request that enters the queue, or returns to it, at the time `now`. Does
        nothing where they are counted already. `model_lane`: the request's model and lane."""
        self._entered.setdefault(request, self._advanced(model_lane, now).seconds)

    def tried(self, request: RequestId, model_lane: tuple[str, Lane], cause: WaitCause, now: float) -> None:
        """Record that `request`, the first one in the queue of its model and lane, could not be placed. `cause`: what
        it waits for from the time `now` on."""
        clock = self._advanced(model_lane, now)
        clock.first, clock.cause = request, cause

    def take(self, request: RequestId, model_lane: tuple[str, Lane], now: float) -> tuple[Wait, ...]:
        """Return the seconds that a request has waited in the queue for something other than its turn, by cause, and
        stop counting them, because the request is sent to workers at the time `now`. `model_lane`: its model and
        lane."""
        clock = self._advanced(model_lane, now)
        clock.first = clock.cause = None
        entered, no_room_s = self._entered.pop(request, clock.seconds), self._no_room_s.pop(request, 0.0)
        spent = [after - before for before, after in zip(entered, clock.seconds, strict=True)]
        causes = zip((*_OF_ALL, WaitCause.NO_ROOM), (*spent, no_room_s), strict=True)
        return tuple(Wait(Stage.QUEUE, cause, seconds) for cause, seconds in causes if seconds > 0)

    def forget(self, request: RequestId) -> None:
        """Stop counting the waits of a request that has ended, and drop what was counted. Does nothing where the
        request does not wait."""
        self._entered.pop(request, None)
        self._no_room_s.pop(request, None)

    def requests(self) -> Set[RequestId]:
        """Return the requests whose waits are being counted."""
        return self._entered.keys()

    def _advanced(self, model_lane: tuple[str, Lane], now: float) -> _LaneClock:
        """Return the clock of a model and lane, after adding the time until `now` to the cause for which the requests
        wait."""
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
