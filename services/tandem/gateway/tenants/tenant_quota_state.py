"""Hold one tenant's quota state at one gateway: its open reservations, and a local quota while Redis is down."""

from __future__ import annotations

from tandem.admission.quota import Levels, QuotaLimits, Reservation, ReservationResult, TenantQuota
from tandem.admission.token_bucket import UNIT, capacity
from tandem.admission.usage_estimator import OutputLengthEstimator
from tandem.core.ids import TenantId
from tandem.gateway.tenants.quota_reservation import QuotaReservation

_NO_EXPIRY_MS = 2**62
"""Lifetime of local reservations, which need not expire: the gateway that holds them also ends them."""


class TenantQuotaState:
    """Quota state of one tenant; `limits` are its own, `levels` those of the shared buckets in Redis' reply at
    `levels_at_ms`.

    Local mode (`is_local`) begins with the first request while Redis is down, and ends with the next heartbeat that
    reaches Redis."""

    def __init__(self, tenant: TenantId, limits: QuotaLimits) -> None:
        self.tenant = tenant
        self.limits = limits
        self.levels = Levels()
        self.output_lengths = OutputLengthEstimator()
        self.entries: dict[str, QuotaReservation] = {}
        self.levels_at_ms = 0
        self.used_at_ms = 0
        self._local_quota: TenantQuota | None = None
        self._local_limits = QuotaLimits()
        self._num_requests = 0
        self._num_tokens = 0

    @property
    def is_local(self) -> bool:
        return self._local_quota is not None

    def reenter(self, entry: QuotaReservation, name: str) -> None:
        """Give a reservation that Redis has lost another name, under which it is entered again."""
        del self.entries[entry.reservation.id]
        entry.reenter(name)
        self.entries[name] = entry

    def enter_local_mode(self, num_gateways: int) -> QuotaLimits:
        """Open a local quota if none is open, and return the part of the limits that it enforces.

        Its buckets start with a part of the last known levels of the shared buckets."""
        self._local_limits = self.limits.share(num_gateways)
        if self._local_quota is None:
            known = zip(self.levels, self._local_limits, strict=False)
            levels = [None if level is None else min(level // num_gateways, capacity(limit)) for level, limit in known]
            self._local_quota = TenantQuota(Levels(*levels), self.levels_at_ms)
            for entry in self.entries.values():
                # Redis has charged its requests and tokens; here it counts towards the concurrency limit only.
                self._local_quota.reserve(
                    Reservation(entry.reservation.id, 0, 0, force=True),
                    self._local_limits,
                    self.levels_at_ms,
                    _NO_EXPIRY_MS,
                )
        return self._local_limits

    def reserve_locally(self, reservation: Reservation, now_ms: int) -> ReservationResult:
        """Reserve in the local quota."""
        assert self._local_quota is not None
        return self._local_quota.reserve(reservation, self._local_limits, now_ms, _NO_EXPIRY_MS)

    def settle_locally(self, entry: QuotaReservation, used: int | None, now_ms: int) -> None:
        """Settle in the local quota, where there is one. Usage of shared reservations is settled in Redis, so it counts
        0 here."""
        if self._local_quota is None:
            return
        self._local_quota.settle(
            entry.reservation.id, 0 if entry.is_shared else used, self._local_limits, now_ms, _NO_EXPIRY_MS
        )
        if used is not None and not entry.is_shared:
            self._num_requests += 1
            self._num_tokens += used

    def leave_local_mode(self, now_ms: int) -> tuple[int, int]:
        """Close the local quota, and return the ended requests and tokens still to be taken from the shared buckets.

        The shared buckets were refilled all the while, so that is the usage less what would have been refilled by
        now."""
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
