"""What answers leave to be counted and told, done for many together; never does what anybody waits for.

Done one by one, in the midst of everybody's tokens, it finds nothing of its code and data in the processor's caches,
and takes four to six times as long as in a row.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from contextvars import Context
from typing import Any

from tandem.obs.log_format import OF_ANOTHER

_log = logging.getLogger(__name__)
DELAY_S = 0.1
MAX_WAITING = 256
"""Works, of some microseconds each: when they are done all streams wait."""


class Aftermath:
    """Of one event loop. Works of one kind are done in the order in which they came."""

    __slots__ = ("_is_doing", "_is_due", "_num_waiting", "_waiting")

    def __init__(self) -> None:
        self._waiting: defaultdict[Callable[..., None], list[tuple[Any, ...]]] = defaultdict(list)
        self._num_waiting = 0
        self._is_due = False
        self._is_doing = False

    def later(self, work: Callable[..., None], *given: Any) -> None:
        """Within `DELAY_S`; at once after those that are being done, where one of these asks for it. One that fails is
        logged, and fails alone."""
        self._waiting[work].append(given)
        if self._is_doing:
            return
        self._num_waiting += 1
        if self._num_waiting >= MAX_WAITING:
            self.do()
        elif not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(DELAY_S, self._do_in_time, context=Context())

    def do(self) -> None:
        """Now, all that waits. Nothing where it is being done."""
        if self._is_doing:
            return
        self._is_doing, self._num_waiting = True, 0
        while self._waiting:
            waiting, self._waiting = self._waiting, defaultdict(list)
            for work, every in waiting.items():
                for given in every:
                    _do(work, given)
        self._is_doing = False

    def _do_in_time(self) -> None:
        self._is_due = False
        self.do()


def _do(work: Callable[..., None], given: tuple[Any, ...]) -> None:
    try:
        work(*given)
    except Exception:
        _log.exception("what an answer left cannot be done: %r", work, extra=OF_ANOTHER)
