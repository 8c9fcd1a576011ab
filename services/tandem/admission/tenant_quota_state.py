"""Hold one tenant's quota state at one gateway: its open reservations, the estimate of its outputs, and a local quota
for the time that Redis is down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.admission.quota import UNIT, Levels, QuotaLimits, Reservation, ReservationResult, TenantQuota, capacity
from tandem.core.ids import TenantId

_NO_EXPIRY_MS = 2**62
"""Lifetime of local reservations, which need not expire: the gateway that holds them also ends them."""
FIRST_GUESS = 256
"""Estimated output tokens for a tenant without history."""
_HISTORY = 8
"""Approximate number of requests in the moving average."""


class TokenUsage(NamedTuple):
    """Tokens that count against a quota: prompt tokens not found in a prefix cache, and all output."""

    prompt: int
    output: int

    @property
    def total(self) -> int:
        return self.prompt + self.output


Meter = Callable[[], TokenUsage | None]
"""Function that returns how many tokens one request has used of its tenant's quotas up to now: prompt tokens that were
not cached, and output tokens. None: no worker has begun the request."""
OnClose = Callable[["QuotaReservation", TokenUsage | None], object]


@dataclass(eq=False, slots=True)
class QuotaReservation:
    """Hold the quota that one request has reserved, until `close` settles it with the tokens that the request used.

    `reservation`: what was reserved, in Redis if `is_shared`, otherwise in this gateway's local quota. `num_reported`:
    how many used tokens were reported to Redis. `levels`: what the tenant's buckets held after the admission. `limits`:
    the limits that were applied. `_on_close` is called once, with the used tokens, or None where no worker has begun
    the request."""

    reservation: Reservation
    levels: Levels
    limits: QuotaLimits
    _on_close: OnClose
    is_shared: bool = field(kw_only=True)
    num_reported: int = 0
    _base: int = 0
    _meter: Meter = lambda: None
    _is_open: bool = True

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


class TenantQuotaState:
    """Hold one tenant's open reservations (`entries`, by id) at this gateway, and its local quota while Redis is
    unreachable.

    `limits`: the tenant's own limits. `levels`: what its buckets in Redis held at the time `levels_at_ms`.
    `used_at_ms`: the time of its latest request. Local mode (`is_local`) begins with the tenant's first request while
    Redis is unreachable and ends with the next heartbeat that reaches Redis."""

    def __init__(self, tenant: TenantId, limits: QuotaLimits) -> None:
        self.tenant = tenant
        self.limits = limits
        self.levels = Levels()
        self.entries: dict[str, QuotaReservation] = {}
        self.levels_at_ms = 0
        self.used_at_ms = 0
        self._recent_output = FIRST_GUESS * _HISTORY
        """Output tokens of about the last _HISTORY requests together."""
        self._local_quota: TenantQuota | None = None
        self._local_limits = QuotaLimits()
        self._num_requests = 0
        self._num_tokens = 0

    @property
    def is_local(self) -> bool:
        """Return whether the tenant's requests are counted in a local quota, because Redis is unreachable."""
        return self._local_quota is not None

    def demand(self, name: str, num_prompt_tokens: int, max_output_tokens: int) -> Reservation:
        """Return the reservation that a request needs, with the id `name` and the tokens that the request will probably
        use.

        Raises TandemError(INVALID_REQUEST) for a prompt that is longer than the tenant's tokens per minute."""
        self.limits.check_prompt(num_prompt_tokens)
        return Reservation(name, 1, self.estimate(num_prompt_tokens, max_output_tokens))

    def estimate(self, num_prompt_tokens: int, max_output_tokens: int) -> int:
        """Return the tokens to reserve for a request: its prompt and its expected output, at most `max_output_tokens`
        of output and the tenant's tokens per minute in total.

        The expected output is a moving average over the tenant's requests. Most clients set `max_tokens` far above what
        they receive, and reserving all of it would block other requests of the same tenant.
        """
        tokens = num_prompt_tokens + min(max_output_tokens, self._recent_output // _HISTORY)
        return min(tokens, self.limits.tokens_per_minute or tokens)

    def enter(
        self, demand: Reservation, result: ReservationResult, limits: QuotaLimits, on_close: OnClose, *, is_shared: bool
    ) -> QuotaReservation:
        """Add the open reservation that was requested with `demand`, and return it.

        `result`: the answer of Redis (`is_shared`) or of the local quota, under `limits`. `on_close`: called when the
        request ends; it must call `end`. Raises RateLimitedError where `result` refuses the reservation.
        """
        result.require_granted(limits)
        entry = QuotaReservation(demand, result.levels, limits, on_close, is_shared=is_shared)
        self.entries[demand.id] = entry
        return entry

    def enter_locally(self, demand: Reservation, num_gateways: int, now_ms: int, on_close: OnClose) -> QuotaReservation:
        """Reserve `demand` in the local quota, which has the tenant's limits divided by `num_gateways`, and add and
        return the open reservation. `on_close`: as in `enter`. Raises RateLimitedError where a limit is exceeded."""
        limits, quota = self._enter_local_mode(num_gateways)
        demand = demand._replace(tokens=min(demand.tokens, limits.tokens_per_minute or demand.tokens))
        result = quota.reserve(demand, limits, now_ms, _NO_EXPIRY_MS)
        return self.enter(demand, result, limits, on_close, is_shared=False)

    def end(self, entry: QuotaReservation, spent: TokenUsage | None, now_ms: int) -> int | None:
        """Remove the reservation of a request that has ended, settle it in the local quota, and add the length of the
        request's output to the average from which later outputs are estimated.

        `spent`: the tokens that the request has used; None where no worker has begun it. Returns how many of them count
        against the reservation, or None.
        """
        del self.entries[entry.reservation.id]
        if spent is not None:
            self._recent_output += spent.output - self._recent_output // _HISTORY
        used = entry.used(spent)
        self._settle_locally(entry, used, now_ms)
        return used

    def check(self) -> None:
        """Verify the local quota, for tests. Raises AssertionError with a message about the first mismatch."""
        if self._local_quota is not None:
            self._local_quota.check()

    def reenter(self, entry: QuotaReservation, name: str) -> None:
        """Rename the reservation `entry`, which Redis has lost, to `name` and reduce it to the tokens not reported yet,
        so that it can be made in Redis again."""
        del self.entries[entry.reservation.id]
        entry.reenter(name)
        self.entries[name] = entry

    def _enter_local_mode(self, num_gateways: int) -> tuple[QuotaLimits, TenantQuota]:
        """Open a local quota unless one is open, and return it with the limits that it enforces: the tenant's, divided
        by `num_gateways`.

        Its buckets start with that fraction of what was left in Redis when it last replied."""
        self._local_limits = self.limits.share(num_gateways)
        if self._local_quota is None:
            known = zip(self.levels, self._local_limits, strict=False)
            levels = [None if level is None else min(level // num_gateways, capacity(limit)) for level, limit in known]
            self._local_quota = TenantQuota(Levels(*levels), self.levels_at_ms)
            for name in self.entries:
                # Redis has charged its requests and tokens; here it counts towards the concurrency limit only.
                held = Reservation(name, 0, 0, force=True)
                self._local_quota.reserve(held, self._local_limits, self.levels_at_ms, _NO_EXPIRY_MS)
        return self._local_limits, self._local_quota

    def _settle_locally(self, entry: QuotaReservation, used: int | None, now_ms: int) -> None:
        """Settle a reservation in the local quota with the tokens that its request `used`; None: no worker has begun
        it.

        Does nothing outside local mode. A reservation that was made in Redis counts 0 here, because it is settled
        there.
        """
        if self._local_quota is None:
            return
        self._local_quota.settle(
            entry.reservation.id, 0 if entry.is_shared else used, self._local_limits, now_ms, _NO_EXPIRY_MS
        )
        if used is not None and not entry.is_shared:
            self._num_requests += 1
            self._num_tokens += used

    def leave_local_mode(self, now_ms: int) -> tuple[int, int]:
        """Close the local quota, and return how many requests and tokens used in local mode must still be taken from
        the buckets in Redis.

        What the local buckets have regained by refilling is left out, because the buckets in Redis were refilled in the
        same time. Open reservations are left out as well: the caller makes them in Redis."""
        assert self._local_quota is not None
        self._local_quota.renew({}, self._local_limits, now_ms, _NO_EXPIRY_MS)
        local = [entry.reservation for entry in self.entries.values() if not entry.is_shared]
        levels, limits = self._local_quota.levels, self._local_limits
        requests = _lacking(levels.requests, limits.requests_per_minute) - sum(held.requests for held in local)
        tokens = _lacking(levels.tokens, limits.tokens_per_minute) - sum(held.tokens for held in local)
        owed = max(0, min(self._num_requests, requests)), max(0, min(self._num_tokens, tokens))
        self._local_quota = None
        self._num_requests = 0
        self._num_tokens = 0
        return owed


def _lacking(level: int | None, limit: int) -> int:
    """Return what a bucket lacks to be full, in whole requests or tokens."""
    return 0 if level is None else (capacity(limit) - level) // UNIT
