"""What answers leave to be counted and told, done for many together; never does what anybody waits for.

Done one by one, in the midst of everybody's tokens, it finds nothing of its code and data in the processor's caches,
and takes four to six times as long as in a row.
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
"""Done with all that was left for it, in the order in which it came."""
_log = logging.getLogger(__name__)
DELAY_S = 1.0
AT_ONCE = 32
"""Of what was given for one work."""
TURN_S = 0.002
"""All streams wait for a turn. What takes longer than one is done in several, and no work is begun in one that is over.
Many short turns would cost more than they are worth: after each nothing that streams need is in the caches."""
MAX_WAITING = 256
"""From so many on, for all works together, each that comes has some done."""


class DeferredBatches:
    """Of one event loop. `now` in seconds."""

    __slots__ = ("_is_doing", "_is_due", "_now", "_num_waiting", "_waiting")

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._waiting: dict[Work[Any], list[Any]] = {}
        self._num_waiting = 0
        self._is_due = False
        self._is_doing = False

    def later(self, work: Work[T], given: T) -> None:
        """Within `DELAY_S`, or as soon as what waits before it is done, together with what else was given for this
        work. If it fails that is logged, and other work is done."""
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
        """Now, all that waits, and what that leaves to be done. Nothing where it is being done."""
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
        """A turn's worth, at least of one work. Of what has more than `AT_ONCE` others come in between."""
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
    """What is to be done one by one, and to fail one by one."""

    def done(given: Sequence[T]) -> None:
        for one in given:
            _do(work, one)

    return done


def _do(work: Callable[[T], None], given: T) -> None:
    try:
        work(given)
    except Exception:
        _log.exception("what an answer left cannot be done: %r", work, extra=OF_ANOTHER)
