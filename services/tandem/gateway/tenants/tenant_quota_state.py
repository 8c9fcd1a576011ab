"""What one gateway knows of one tenant's quotas: what it has open there, and its own book while it is alone; never asks
a store."""

from __future__ import annotations

from tandem.admission.quota import Levels, QuotaLimits, Reservation, ReservationResult, TenantQuota
from tandem.admission.token_bucket import UNIT, capacity
from tandem.admission.usage_estimator import OutputLengthEstimator
from tandem.core.ids import TenantId
from tandem.gateway.tenants.quota_reservation import QuotaReservation

_FOR_EVER_MS = 2**62
"""In a gateway's own book nothing lapses: it knows what it has open."""


class TenantQuotaState:
    """`limits` are the tenant's own; `levels` those that the shared books told last, at `told_at_ms`."""

    def __init__(self, tenant: TenantId, limits: QuotaLimits) -> None:
        self.tenant = tenant
        self.limits = limits
        self.levels = Levels()
        self.guess = OutputLengthEstimator()
        self.entries: dict[str, QuotaReservation] = {}
        self.told_at_ms = self.used_at_ms = 0
        self._book: TenantQuota | None = None
        self._share = QuotaLimits()
        self._num_requests = 0
        self._num_tokens = 0

    @property
    def is_alone(self) -> bool:
        return self._book is not None

    def begin_again(self, entry: QuotaReservation, name: str) -> None:
        """Give an entry that the books have lost another name, under which it is to be entered."""
        del self.entries[entry.ask.id]
        entry.begin_again(name)
        self.entries[name] = entry

    def enter_local_mode(self, num_gateways: int) -> QuotaLimits:
        """Open a book of this gateway's own, if none is open; returns the part of the limits that it keeps. It begins
        with a part of what the shared buckets had when they were last heard of."""
        self._share = self.limits.share(num_gateways)
        if self._book is None:
            known = zip(self.levels, self._share, strict=False)
            begin = [None if level is None else min(level // num_gateways, capacity(limit)) for level, limit in known]
            self._book = TenantQuota(Levels(*begin), self.told_at_ms)
            for entry in self.entries.values():
                # Its requests and tokens are taken already; that it is open counts here too.
                self._book.reserve(
                    Reservation(entry.ask.id, 0, 0, force=True), self._share, self.told_at_ms, _FOR_EVER_MS
                )
        return self._share

    def reserve_alone(self, ask: Reservation, now_ms: int) -> ReservationResult:
        """By this gateway's own book."""
        assert self._book is not None
        return self._book.reserve(ask, self._share, now_ms, _FOR_EVER_MS)

    def settle_alone(self, entry: QuotaReservation, used: int | None, now_ms: int) -> None:
        """In this gateway's own book, where it has one. What it was not asked for is settled elsewhere too."""
        if self._book is None:
            return
        self._book.settle(entry.ask.id, 0 if entry.is_shared else used, self._share, now_ms, _FOR_EVER_MS)
        if used is not None and not entry.is_shared:
            self._num_requests += 1
            self._num_tokens += used

    def leave_local_mode(self, now_ms: int) -> tuple[int, int]:
        """Give the book up. Returns the requests and tokens of what has ended that the shared buckets, which filled up
        all the while, have still to give: all that was used, less what would be full again by now."""
        assert self._book is not None
        self._book.renew({}, self._share, now_ms, _FOR_EVER_MS)
        is_open = [entry.ask for entry in self.entries.values() if not entry.is_shared]
        levels, limits = self._book.levels, self._share
        requests = _lacking(levels.requests, limits.requests_per_minute) - sum(ask.requests for ask in is_open)
        tokens = _lacking(levels.tokens, limits.tokens_per_minute) - sum(ask.tokens for ask in is_open)
        owed = max(0, min(self._num_requests, requests)), max(0, min(self._num_tokens, tokens))
        self._book, self._num_requests, self._num_tokens = None, 0, 0
        return owed

    def __repr__(self) -> str:
        return f"<account of {self.tenant}, {len(self.entries)} open{', alone' if self.is_alone else ''}>"


def _lacking(level: int | None, limit: int) -> int:
    """What a bucket lacks to be full, in whole requests or tokens."""
    return 0 if level is None else (capacity(limit) - level) // UNIT
