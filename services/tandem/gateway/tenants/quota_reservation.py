"""One admitted request as its tenant's quotas see it, from reservation to settlement; never asks a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.admission.quota import Levels, QuotaLimits, Reservation
from tandem.admission.tenant import Tenant
from tandem.admission.token_bucket import UNIT, capacity, wait_ms
from tandem.admission.usage_estimator import TokenUsage
from tandem.gateway.context.interfaces import Meter
from tandem.gateway.context.rate_limit_status import RateLimitStatus


class UnlimitedReservation:
    """Of a tenant without limits."""

    standing = RateLimitStatus()

    def watch(self, meter: Meter) -> None:
        pass

    def close(self) -> None:
        pass


class QuotaReservation:
    """`ask` is the reservation, in the shared books where `is_shared`; `told` is what they were last told of it."""

    __slots__ = ("_base", "_is_open", "_meter", "_on_close", "ask", "is_shared", "standing", "told")

    def __init__(
        self,
        ask: Reservation,
        standing: RateLimitStatus,
        on_close: Callable[[QuotaReservation, TokenUsage | None], None],
        *,
        is_shared: bool,
    ) -> None:
        self.ask = ask
        self.standing = standing
        self.is_shared = is_shared
        self.told = 0
        self._base = 0
        self._on_close = on_close
        self._meter: Meter = _nothing
        self._is_open = True

    def watch(self, meter: Meter) -> None:
        self._meter = meter

    def close(self) -> None:
        """Settle with what the meter says, once."""
        if self._is_open:
            self._is_open = False
            self._on_close(self, self._meter())

    def used(self, spent: TokenUsage | None) -> int | None:
        """Tokens that count against this reservation. None: nothing was used, and the request counts for nothing."""
        return None if spent is None else max(0, spent.total - self._base)

    def so_far(self) -> int:
        return self.used(self._meter()) or 0

    def begin_again(self, name: str) -> None:
        """The books have settled this one with what they were told: the rest goes under another name, whatever is
        left. The request itself has been counted."""
        tokens = max(0, self.ask.tokens - self.told)
        self._base += self.told
        self.told = 0
        self.ask = Reservation(name, 0, tokens, force=True)

    def __repr__(self) -> str:
        where = "shared" if self.is_shared else "alone"
        return f"<entry {self.ask.id} of {self.ask.tokens} tokens, {where}{'' if self._is_open else ', closed'}>"


def _nothing() -> None:
    return None


def standing(levels: Levels, limits: QuotaLimits) -> RateLimitStatus:
    """Where the buckets stand, in whole requests and tokens; a debt leaves none."""
    return RateLimitStatus(
        limit_requests=limits.requests_per_minute or None,
        remaining_requests=_remaining(levels.requests),
        reset_requests_s=_reset_s(levels.requests, limits.requests_per_minute),
        limit_tokens=limits.tokens_per_minute or None,
        remaining_tokens=_remaining(levels.tokens),
        reset_tokens_s=_reset_s(levels.tokens, limits.tokens_per_minute),
    )


def _remaining(level: int | None) -> int | None:
    return None if level is None else max(0, level // UNIT)


def _reset_s(level: int | None, limit: int) -> float:
    return 0.0 if level is None or not limit else wait_ms(level, limit, capacity(limit)) / 1000


class NoQuotas:
    """The Quotas of a gateway that serves everybody: nobody has limits."""

    def check_feasible(self, tenant: Tenant, sizes: Sequence[tuple[int, int]]) -> None:
        pass

    async def enter(self, tenant: Tenant, num_prompt_tokens: int, max_output_tokens: int) -> UnlimitedReservation:
        return UnlimitedReservation()
