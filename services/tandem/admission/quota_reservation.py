"""Hold what one admitted request has reserved of its tenant's quota, and settle it when the request ends."""

from __future__ import annotations

from collections.abc import Callable

from tandem.admission.quota import Levels, QuotaLimits, Reservation
from tandem.admission.usage_estimator import TokenUsage

Meter = Callable[[], TokenUsage | None]
"""Function that returns how many tokens one request has used of its tenant's quotas up to now: prompt tokens that were
not cached, and output tokens. None: no worker has begun the request."""
OnClose = Callable[["QuotaReservation", TokenUsage | None], object]


class QuotaReservation:
    """Hold the quota that one request has reserved, until `close` settles it with the tokens that the request used.

    `reservation`: what was reserved, in Redis if `is_shared`, otherwise in this gateway's local quota. `num_reported`:
    how many used tokens were reported to Redis. `levels`: what the tenant's buckets held after the admission. `limits`:
    the limits that were applied. `on_close` is called once, with the used tokens, or None where no worker has begun the
    request."""

    __slots__ = (
        "_base", "_is_open", "_meter", "_on_close", "is_shared", "levels", "limits", "num_reported", "reservation",
    )  # fmt: skip

    def __init__(
        self,
        reservation: Reservation,
        levels: Levels,
        limits: QuotaLimits,
        on_close: OnClose,
        *,
        is_shared: bool,
    ) -> None:
        self.reservation = reservation
        self.levels = levels
        self.limits = limits
        self.is_shared = is_shared
        self.num_reported = 0
        self._base = 0
        self._on_close = on_close
        self._meter: Meter = _no_usage
        self._is_open = True

    def watch(self, meter: Meter) -> None:
        """Set the function that returns the tokens that the request has used so far. Before this call the use counts as
        None: no worker has begun the request."""
        self._meter = meter

    def close(self) -> None:
        """Settle the reservation with the tokens that the request has used by now, as the function set by `watch`
        returns them. A second call does nothing."""
        if self._is_open:
            self._is_open = False
            self._on_close(self, self._meter())

    def used(self, spent: TokenUsage | None) -> int | None:
        """Return how many of the tokens that the request has `spent` count against this reservation.

        Tokens that were settled under an earlier reservation of the request do not count. Returns None where no worker
        has begun the request, which then costs nothing.
        """
        return None if spent is None else max(0, spent.total - self._base)

    def used_so_far(self) -> int:
        """Return how many tokens count against this reservation up to now; 0 where no worker has begun the request."""
        return self.used(self._meter()) or 0

    def reenter(self, name: str) -> None:
        """Replace the reservation by a new one with the id `name` and the tokens not yet reported to Redis.

        Called when Redis has lost the reservation or settled it with the tokens reported so far. The new reservation
        does not count as a request and is granted even beyond the limits.
        """
        tokens = max(0, self.reservation.tokens - self.num_reported)
        self._base += self.num_reported
        self.num_reported = 0
        self.reservation = Reservation(name, 0, tokens, force=True)


def _no_usage() -> None:
    return None
