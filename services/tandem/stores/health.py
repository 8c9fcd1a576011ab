"""Whether Redis does what one program asks of it, as all its stores have found; never asks it anything."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

_log = logging.getLogger(__name__)


class RedisHealth:
    """Up until something fails, and again once all that failed has been answered. Says so in the log at each change,
    however many calls fail. `num_errors` by store."""

    def __init__(self) -> None:
        self.num_errors: Counter[str] = Counter()
        self._failing: dict[tuple[str, str], str] = {}

    @property
    def is_up(self) -> bool:
        return not self._failing

    @property
    def problem(self) -> str | None:
        """What failed first of what fails now."""
        return next(iter(self._failing.values()), None)

    def answered(self, store: str, command: str) -> None:
        """Reads may be answered while writes fail, so each command is its own witness."""
        if self._failing.pop((store, command), None) is not None and not self._failing:
            _log.info("Redis answers again")

    def failed(self, store: str, command: str, error: BaseException) -> None:
        self.num_errors[store] += 1
        if not self._failing:
            _log.warning("Redis fails; going on with what is known: %s of %s: %s", command, store, _words(error))
        self._failing.setdefault((store, command), _words(error))

    def gauges(self) -> Mapping[str, float]:
        """For `/metrics`."""
        return {"tandem_redis_up": self.is_up}

    def counts(self) -> Mapping[str, int]:
        """What only grows, for `/metrics`."""
        return {"tandem_redis_errors_total": self.num_errors.total()}

    def __repr__(self) -> str:
        return f"<redis {'up' if self.is_up else self.problem}, {self.num_errors.total()} errors>"


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
