"""Reserve tokens of a tenant's quota for one admitted request, and settle them when the request ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tandem.admission.quota import Reservation
from tandem.admission.tenant import Tenant
from tandem.admission.usage_estimator import TokenUsage
from tandem.gateway.context.interfaces import Meter


class UnlimitedReservation:
    """Reservation of a tenant without limits."""

    rate_limits: Mapping[str, str] = {}

    def watch(self, meter: Meter) -> None:
        pass

    def close(self) -> None:
        pass


class QuotaReservation:
    """Quota that one request holds until it ends.

    `reservation` is what was reserved: in Redis if `is_shared`, else in this gateway's local quota. `num_reported`
    counts the used tokens that Redis knows of. `rate_limits` are the headers of the tenant's rate limits after the
    reservation."""

    __slots__ = ("_base", "_is_open", "_meter", "_on_close", "is_shared", "num_reported", "rate_limits", "reservation")

    def __init__(
        self,
        reservation: Reservation,
        rate_limits: Mapping[str, str],
        on_close: Callable[[QuotaReservation, TokenUsage | None], None],
        *,
        is_shared: bool,
    ) -> None:
        self.reservation = reservation
        self.rate_limits = rate_limits
        self.is_shared = is_shared
        self.num_reported = 0
        self._base = 0
        self._on_close = on_close
        self._meter: Meter = _no_usage
        self._is_open = True

    def watch(self, meter: Meter) -> None:
        self._meter = meter

    def close(self) -> None:
        """Settle with the usage that the meter returns; a second call does nothing."""
        if self._is_open:
            self._is_open = False
            self._on_close(self, self._meter())

    def used(self, spent: TokenUsage | None) -> int | None:
        """Return the tokens that count against this reservation; None where no worker began the request, which then
        costs nothing."""
        return None if spent is None else max(0, spent.total - self._base)

    def used_so_far(self) -> int:
        """Return the tokens used up to now."""
        return self.used(self._meter()) or 0

    def reenter(self, name: str) -> None:
        """Replace the reservation by one for the unreported tokens, under another name and without a limit check.

        Called when Redis has already settled the reservation with the tokens reported to it. The new one counts no
        request."""
        tokens = max(0, self.reservation.tokens - self.num_reported)
        self._base += self.num_reported
        self.num_reported = 0
        self.reservation = Reservation(name, 0, tokens, force=True)


def _no_usage() -> None:
    return None


class NoQuotas:
    """Quotas of a gateway without authentication: nobody has limits."""

    def check_feasible(self, tenant: Tenant, sizes: Sequence[tuple[int, int]]) -> None:
        pass

    async def enter(self, tenant: Tenant, num_prompt_tokens: int, max_output_tokens: int) -> UnlimitedReservation:
        return UnlimitedReservation()
