"""Run the telemetry work of ended requests later and in batches, off the path of the tokens.

Run for one request at a time, between the tokens of others, this work finds neither its code nor its data in the
processor's caches and takes four to six times as long as in a batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any, TypeVar

from tandem.obs.logs.log_formatters import OF_ANOTHER

T = TypeVar("T")
Work = Callable[[Sequence[T]], None]
"""Called with a batch of items, in the order in which they were given to `later`."""
_log = logging.getLogger(__name__)
DELAY_S = 1.0
"""Seconds from the first deferred item to the first turn."""
AT_ONCE = 32
"""Largest number of items in one call of a work function."""
TURN_S = 0.002
"""Length of one turn in seconds, during which all token streams wait. Work that takes longer is spread over several
turns, and no call begins after the turn's end. Shorter turns would cost more in sum: after each of them the data that
streams need has left the processor's caches."""
MAX_WAITING = 256
"""Number of waiting items, over all work functions, from which on every further item runs a turn at once."""


class DeferredBatches:
    """Own the deferred items of one event loop, by the function that will process them. `now`: a clock in seconds."""

    __slots__ = ("_is_doing", "_is_due", "_now", "_num_waiting", "_waiting")

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._waiting: dict[Work[Any], list[Any]] = {}
        self._num_waiting = 0
        self._is_due = False
        self._is_doing = False

    def later(self, work: Work[T], given: T) -> None:
        """Call `work` with `given` and the other items given for the same function, within `DELAY_S` or as soon as
        earlier items are done. A call that raises is logged and stops no other."""
        waiting = self._waiting.get(work)
        if waiting is None:
            waiting = self._waiting[work] = []
        waiting.append(given)
        self._num_waiting += 1
        if self._num_waiting >= MAX_WAITING:
            self._do_some()
        if not self._is_due:
            self._begin_in(DELAY_S)
            self._is_due = True

    def do(self) -> None:
        """Process all waiting items now, with those that are deferred meanwhile; do nothing when called from work that
        is being processed."""
        while self._waiting and not self._is_doing:
            self._do_some()

    def _begin_in(self, delay_s: float) -> None:
        asyncio.get_running_loop().call_later(delay_s, self._do_in_time, context=Context())

    def _do_in_time(self) -> None:
        self._do_some()
        if self._waiting:
            self._begin_in(0)
        else:
            self._is_due = False

    def _do_some(self) -> None:
        """Run one turn, at least one call. A function with more than `AT_ONCE` items goes to the end of the order
        after each call, so that others get their turn."""
        if self._is_doing:
            return
        self._is_doing = True
        try:
            until = self._now() + TURN_S
            while self._waiting:
                work, waiting = next(iter(self._waiting.items()))
                given, rest = waiting[:AT_ONCE], waiting[AT_ONCE:]
                del self._waiting[work]
                if rest:
                    self._waiting[work] = rest
                self._num_waiting -= len(given)
                _do(work, given)
                if self._now() >= until:
                    break
        finally:
            self._is_doing = False


def for_each(work: Callable[[T], None]) -> Work[T]:
    """Make a function for batches out of one for single items; an item that raises is logged and skipped."""

    def run_each(items: Sequence[T]) -> None:
        for item in items:
            _do(work, item)

    return run_each


def _do(work: Callable[[T], None], given: T) -> None:
    try:
        work(given)
    except Exception:
        _log.exception("deferred telemetry of a request failed in %r", work, extra=OF_ANOTHER)
