"""Make the telemetry calls of ended requests later, many in a row, so that tokens do not wait for them.

If each call were made at the end of its request, between the tokens of other requests, it would find neither its code
nor its data in the processor's caches and take several times as long.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextvars import Context

from tandem.obs.logs.log_formatters import OF_ANOTHER

_log = logging.getLogger(__name__)
DELAY_S = 1.0
"""Seconds after which a deferred call is made, with all that were deferred until then."""
AT_ONCE = 128
"""Number of waiting calls at which all of them are made without a delay. A request has some five calls of 10 to 20 us,
so all token streams wait for a few milliseconds at most."""


class DeferredCalls:
    """Collect function calls and make them later, many in a row, on the event loop that collects them."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._is_due = False
        self._is_running = False

    def later(self, call: Callable[[], None]) -> None:
        """Enqueue `call`, to be made within `DELAY_S` seconds and in the order of the `later` calls.

        The call that makes the queue reach `AT_ONCE` entries makes all of them before it returns. A call that raises is
        logged, and the others are still made."""
        self._calls.append(call)
        if len(self._calls) >= AT_ONCE:
            Context().run(self.do)
        elif not self._is_due:
            asyncio.get_running_loop().call_later(DELAY_S, self._do_in_time, context=Context())
            self._is_due = True

    def do(self) -> None:
        """Make all waiting calls now, and those that they enqueue meanwhile.

        Does nothing where one of the waiting calls calls `do` itself.
        """
        if self._is_running:
            return
        self._is_running = True
        while self._calls:
            call = self._calls.popleft()
            try:
                call()
            except Exception:
                _log.exception("the telemetry of a request is incomplete, because %r failed", call, extra=OF_ANOTHER)
        self._is_running = False

    def _do_in_time(self) -> None:
        self._is_due = False
        self.do()
