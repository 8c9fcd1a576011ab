"""Track whether Redis executes the commands of this process's stores, from the results that they report."""

from __future__ import annotations

import logging
from collections import Counter

from tandem.core.clock import Clock, SystemClock

SILENT_S = 60.0
"""A failure is forgotten after this time if its command was not sent again and other commands succeed."""

_log = logging.getLogger(__name__)


class RedisHealth:
    """Track whether Redis executes the commands of this process's stores, and log each change once.

    Redis counts as down as soon as a command fails, and as up once every command that failed has succeeded again.
    `num_errors`: number of failed commands since the start, by the name of the store.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.num_errors: Counter[str] = Counter()
        self._clock = clock or SystemClock()
        # (store, command) -> (the command's first error, time of its last error)
        self._failing: dict[tuple[str, str], tuple[str, float]] = {}

    @property
    def is_up(self) -> bool:
        """Return whether no command is failing."""
        return not self._failing

    @property
    def problem(self) -> str | None:
        """Return the first error of the command that has been failing longest, as text; None if Redis is up."""
        return next((text for text, _ in self._failing.values()), None)

    def answered(self, store: str, command: str) -> None:
        """Record that a command of a store succeeded, which ends an earlier failure of the same command.

        Failures of other commands stay, because reads may succeed while writes fail.
        """
        if not self._failing:
            return
        since = self._clock.now() - SILENT_S
        self._failing.pop((store, command), None)
        self._failing = {key: failure for key, failure in self._failing.items() if failure[1] > since}
        if not self._failing:
            _log.info("Redis answers again")

    def failed(self, store: str, command: str, error: BaseException) -> None:
        """Record that a command of a store failed with `error`. `store`, `command`: names of the store and of the Redis
        command."""
        self.num_errors[store] += 1
        if not self._failing:
            message = "Redis fails to execute %s for the store %s, and this process goes on without Redis: %s"
            _log.warning(message, command, store, _text(error))
        text, _ = self._failing.get((store, command), (_text(error), 0.0))
        self._failing[store, command] = text, self._clock.now()


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
