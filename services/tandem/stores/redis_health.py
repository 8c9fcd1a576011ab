"""Whether Redis does what one program asks of it, as all its stores have found; never asks it anything."""

from __future__ import annotations

import logging
from collections import Counter

from tandem.core.clock import Clock, SystemClock

SILENT_S = 60.0
"""A command that failed and that nobody has asked for since says nothing any more, where others are answered."""

_log = logging.getLogger(__name__)


class RedisHealth:
    """Up until something fails, and again once all that failed has been answered. Says so in the log at each change,
    however many calls fail. `num_errors` by store."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.num_errors: Counter[str] = Counter()
        self._clock = clock or SystemClock()
        # What failed first of each, and when it failed last.
        self._failing: dict[tuple[str, str], tuple[str, float]] = {}

    @property
    def is_up(self) -> bool:
        return not self._failing

    @property
    def problem(self) -> str | None:
        """What failed first of what fails now."""
        return next((words for words, _ in self._failing.values()), None)

    def answered(self, store: str, command: str) -> None:
        """Reads may be answered while writes fail, so each command is its own witness."""
        if not self._failing:
            return
        since = self._clock.now() - SILENT_S
        self._failing.pop((store, command), None)
        self._failing = {asked: failure for asked, failure in self._failing.items() if failure[1] > since}
        if not self._failing:
            _log.info("Redis answers again")

    def failed(self, store: str, command: str, error: BaseException) -> None:
        self.num_errors[store] += 1
        if not self._failing:
            _log.warning("Redis fails; going on with what is known: %s of %s: %s", command, store, _words(error))
        words, _ = self._failing.get((store, command), (_words(error), 0.0))
        self._failing[store, command] = words, self._clock.now()

    def __repr__(self) -> str:
        return f"<redis {'up' if self.is_up else self.problem}, {self.num_errors.total()} errors>"


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
