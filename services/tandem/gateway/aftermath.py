"""What answers leave to be counted and told, done for many together; never does what anybody waits for.

Done one by one, in the midst of everybody's tokens, it finds nothing of its code and data in the processor's caches,
and takes four to six times as long as in a row.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any

from tandem.obs.log_format import OF_ANOTHER

_log = logging.getLogger(__name__)
DELAY_S = 0.25
AT_ONCE = 32
"""Works, of some tens of microseconds each, for which all streams wait; then it is their turn again."""
MAX_WAITING = 256
"""Works that may wait for their time."""


class Aftermath:
    """Of one event loop. Works of one kind are done in the order in which they came."""

    __slots__ = ("_is_doing", "_is_due", "_num_waiting", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[Callable[..., None], deque[tuple[Any, ...]]] = {}
        self._num_waiting = 0
        self._is_due = False
        self._is_doing = False

    def later(self, work: Callable[..., None], *given: Any) -> None:
        """Within `DELAY_S`, or as soon as those before it are done. One that fails is logged, and fails alone."""
        waiting = self._waiting.get(work)
        if waiting is None:
            waiting = self._waiting[work] = deque()
        waiting.append(given)
        self._num_waiting += 1
        if self._num_waiting >= MAX_WAITING:
            self._do_some(AT_ONCE)
        if not self._is_due:
            self._is_due = True
            self._begin_in(DELAY_S)

    def do(self) -> None:
        """Now, all that waits, and what that leaves to be done. Nothing where it is being done."""
        while self._waiting and not self._is_doing:
            self._do_some(self._num_waiting)

    def _begin_in(self, delay_s: float) -> None:
        asyncio.get_running_loop().call_later(delay_s, self._do_in_time, context=Context())

    def _do_in_time(self) -> None:
        self._do_some(AT_ONCE)
        if self._waiting:
            self._begin_in(0)
        else:
            self._is_due = False

    def _do_some(self, num_works: int) -> None:
        if self._is_doing:
            return
        self._is_doing = True
        try:
            while num_works > 0 and self._waiting:
                work, waiting = next(iter(self._waiting.items()))
                num_done = min(num_works, len(waiting))
                num_works -= num_done
                self._num_waiting -= num_done
                for _ in range(num_done):
                    _do(work, waiting.popleft())
                if not waiting:
                    del self._waiting[work]
        finally:
            self._is_doing = False


def _do(work: Callable[..., None], given: tuple[Any, ...]) -> None:
    try:
        work(*given)
    except Exception:
        _log.exception("what an answer left cannot be done: %r", work, extra=OF_ANOTHER)
