"""One tenant's quotas: two buckets and the reservations that are open; never reads a clock.

This is the meaning of `stores/lua/quota.lua`, which is how gateways share one tenant's books in Redis; a gateway that
cannot reach Redis keeps a book of its own. A reservation takes what a request is thought to use. Whoever made it
renews it, telling what was used so far, and settles it with what was used in the end: the rest goes back, or more is
taken, into debt if need be. One that is not renewed in time is settled with what was told last, by whoever looks next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tandem.admission.token_bucket import UNIT, capacity, refill, wait_ms

MAX_SWEEP = 256
"""Reservations that one call settles because their time is over; the next call goes on."""
MAX_BACK_MS = 60_000
"""A clock that stands further back was set, by far and for good: books that waited for it would starve their tenant."""
REQUESTS, TOKENS, CONCURRENCY = "requests_per_minute", "tokens_per_minute", "concurrency"


class QuotaLimits(NamedTuple):
    """0 is no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_concurrency: int = 0

    def share(self, parts: int) -> QuotaLimits:
        """One of several equal parts, each at least 1, because 0 is no limit."""
        return QuotaLimits(*(max(1, limit // parts) if limit else 0 for limit in self))


class Levels(NamedTuple):
    """Of both buckets, in units of `bucket.UNIT`; None where there is no limit."""

    requests: int | None = None
    tokens: int | None = None


class Reservation(NamedTuple):
    """What a reservation takes; `id` is its own in all gateways and for all time. `force`: whatever is left, because it
    was used already."""

    id: str
    requests: int
    tokens: int
    force: bool = False


class ReservationResult(NamedTuple):
    """`refused` names the limit, "" is a grant. `wait_ms` is when its bucket will have enough, if nobody else takes it;
    0 for concurrency, of which nobody knows."""

    levels: Levels
    refused: str = ""
    wait_ms: int = 0


@dataclass(slots=True)
class _Reservation:
    """`charged` tokens are taken, of which `used` were told, so used <= charged."""

    requests: int
    charged: int
    used: int
    expires_ms: int


class TenantQuota:
    """The books of one tenant, kept under the limits that each call brings. Time in milliseconds.

    Where the time goes back by up to MAX_BACK_MS it stands still; by more, the books go on from there: with what the
    buckets have, and with no reservation open for longer than the time to live, `ttl_ms`, that the call brings.
    """

    def __init__(self, levels: Levels | None = None, now_ms: int = 0) -> None:
        """`levels` to begin with; None: as full as the limits that the first call brings."""
        self.levels = levels or Levels()
        self.open: dict[str, _Reservation] = {}
        self._at_ms = now_ms
        self._limits = QuotaLimits()

    def reserve(self, ask: Reservation, limits: QuotaLimits, now_ms: int, ttl_ms: int) -> ReservationResult:
        """Take all or nothing. Asking again under an id that is open takes nothing more."""
        now = self._advance(limits, now_ms, ttl_ms)
        if ask.id in self.open:
            return ReservationResult(self.levels)
        refused, wait = ("", 0) if ask.force else self._lacks(ask, limits)
        if refused:
            return ReservationResult(self.levels, refused, wait)
        self._give(-ask.requests, -ask.tokens)
        self.open[ask.id] = _Reservation(ask.requests, ask.tokens, 0, now + ttl_ms)
        return ReservationResult(self.levels)

    def renew(self, used: Mapping[str, int], limits: QuotaLimits, now_ms: int, ttl_ms: int) -> list[str]:
        """Keep reservations open, with the tokens that each used so far. Returns those that are not open any more.
        What is beyond a reservation is taken at once."""
        now = self._advance(limits, now_ms, ttl_ms)
        gone = []
        for name, told in used.items():
            held = self.open.get(name)
            if held is None:
                gone.append(name)
                continue
            held.used = max(held.used, told)
            self._give(0, min(0, held.charged - held.used))
            held.charged = max(held.charged, held.used)
            held.expires_ms = now + ttl_ms
        return gone

    def settle(self, name: str, used: int | None, limits: QuotaLimits, now_ms: int, ttl_ms: int) -> bool:
        """End a reservation with the tokens that it used in all; None: it is as if it had never been. False: it is not
        open, and nothing changes."""
        self._advance(limits, now_ms, ttl_ms)
        held = self.open.pop(name, None)
        if held is None:
            return False
        self._give(held.requests if used is None else 0, held.charged - (used or 0))
        return True

    def check(self) -> None:
        """No bucket is more than full, and nothing is open that took less than it used."""
        for level, limit in zip(self.levels, self._limits, strict=False):
            assert level is None or level <= capacity(limit), f"{self!r} has more than {limit}"
        for name, held in self.open.items():
            assert 0 <= held.used <= held.charged, f"{name} used {held.used} of {held.charged}"

    def __repr__(self) -> str:
        return f"<quota {self.levels} at {self._at_ms} ms, {len(self.open)} open>"

    # ---- inside

    def _advance(self, limits: QuotaLimits, now_ms: int, ttl_ms: int) -> int:
        """Fill the buckets up to now and settle what was not renewed; returns the time that counts."""
        if now_ms < self._at_ms - MAX_BACK_MS:
            self._at_ms = now_ms
            for held in self.open.values():
                held.expires_ms = min(held.expires_ms, now_ms + ttl_ms)
        elapsed, self._at_ms = max(0, now_ms - self._at_ms), max(now_ms, self._at_ms)
        self._limits = limits
        self.levels = Levels(
            _level(self.levels.requests, limits.requests_per_minute, elapsed),
            _level(self.levels.tokens, limits.tokens_per_minute, elapsed),
        )
        late = [(held.expires_ms, name.encode()) for name, held in self.open.items() if held.expires_ms <= self._at_ms]
        for _, name in sorted(late)[:MAX_SWEEP]:
            held = self.open.pop(name.decode())
            self._give(0, held.charged - held.used)
        return self._at_ms

    def _lacks(self, ask: Reservation, limits: QuotaLimits) -> tuple[str, int]:
        """The limit that is met, of two that of the longer wait, and that wait."""
        found = [
            (wait_ms(level, limit, needed * UNIT), name)
            for name, level, limit, needed in (
                (REQUESTS, self.levels.requests, limits.requests_per_minute, ask.requests),
                (TOKENS, self.levels.tokens, limits.tokens_per_minute, ask.tokens),
            )
            if level is not None
        ]
        longest, name = max(found, key=lambda pair: pair[0], default=(0, ""))
        if longest:
            return name, longest
        is_crowded = 0 < limits.max_concurrency <= len(self.open)
        return (CONCURRENCY, 0) if is_crowded else ("", 0)

    def _give(self, requests: int, tokens: int) -> None:
        """Back into the buckets, or out of them; a full bucket takes no more."""
        self.levels = Levels(
            _level(self.levels.requests, self._limits.requests_per_minute, 0, requests),
            _level(self.levels.tokens, self._limits.tokens_per_minute, 0, tokens),
        )


def _level(level: int | None, limit: int, elapsed_ms: int, given: int = 0) -> int | None:
    if not limit:
        return None
    return capacity(limit) if level is None else refill(level + given * UNIT, limit, elapsed_ms)
