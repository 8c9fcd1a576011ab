"""Account for one tenant's quotas: two token buckets and the open reservations. The caller passes the time.

Defines the meaning of `stores/lua/quota.lua`, with which gateways share one tenant's quota in Redis; a gateway that
cannot reach Redis keeps a `TenantQuota` of its own. A reservation takes the tokens that a request is estimated to use.
The gateway that made it renews it with the tokens used so far, and settles it with the final use: the rest is returned,
or more is taken, into debt if necessary. A reservation that is not renewed in time is settled with the last reported
use by the next call on the quota.

A bucket holds a minute's worth and fills evenly. Its level is counted in units of 1/60,000: then a limit of L per
minute adds exactly L units per millisecond, without fractions or rounding drift. A level may be negative: a debt, which
must be refilled first. Redis's numbers are exact up to 2^53, which `MAX_LIMIT` keeps far away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem.core.errors import ErrorKind, TandemError

UNIT = 60_000
"""Units of a level that one request or one token takes."""
MAX_LIMIT = 10**9
"""Largest limit per minute."""
MAX_SWEEP = 256
"""Expired reservations that one call settles; the next call continues."""
MAX_BACK_MS = 60_000
"""A clock that jumps back further was set deliberately: waiting until it catches up would starve the tenant."""
REQUESTS, TOKENS, CONCURRENCY = "requests_per_minute", "tokens_per_minute", "concurrency"
_WORDS = {REQUESTS: "requests per minute", TOKENS: "tokens per minute", CONCURRENCY: "requests at once"}
"""The limits, in the order of `QuotaLimits`, as errors name them."""


class QuotaLimits(NamedTuple):
    """Limits of a tenant's quota: requests and tokens per minute, and open requests at a time; 0 means no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_concurrency: int = 0

    def share(self, parts: int) -> QuotaLimits:
        """Return these limits divided by `parts`, each at least 1; a limit of 0, which means no limit, stays 0."""
        return QuotaLimits(*(max(1, limit // parts) if limit else 0 for limit in self))

    def check_prompt(self, num_tokens: int) -> None:
        """Raise TandemError(INVALID_REQUEST) for a prompt of `num_tokens` tokens that is longer than the tokens per
        minute.

        Its HTTP status is not 429, because clients would retry, and the prompt can never be admitted.
        """
        if 0 < self.tokens_per_minute < num_tokens:
            limit = self.tokens_per_minute
            message = f"the prompt has {num_tokens} tokens, more than the {limit} per minute of this key"
            raise TandemError(ErrorKind.INVALID_REQUEST, message, param="prompt", reason=TOKENS)

    def check_batch(self, charges: Sequence[int]) -> None:
        """Raise TandemError(INVALID_REQUEST) for a request with several prompts that even an unused quota would not
        admit.

        `charges`: for each prompt, the tokens that it would reserve; the prompts are admitted all or none. To be
        admitted, the client has to send fewer prompts, or, if the limit on tokens is exceeded, a smaller `max_tokens`;
        waiting does not help.
        """
        num_prompts = len(charges)
        for name, limit in ((REQUESTS, self.requests_per_minute), (CONCURRENCY, self.max_concurrency)):
            if 0 < limit < num_prompts:
                allowed = f"this key may have {limit} {_WORDS[name]}"
                message = f"{num_prompts} prompts count as {num_prompts} requests, and {allowed}"
                raise TandemError(ErrorKind.INVALID_REQUEST, message, param="prompt", reason=name)
        if 0 < self.tokens_per_minute < sum(charges):
            message = (
                f"the {num_prompts} prompts and the output that is expected of them reserve {sum(charges)} tokens, "
                f"and this key may use {self.tokens_per_minute} per minute"
            )
            raise TandemError(ErrorKind.INVALID_REQUEST, message, param="prompt", reason=TOKENS)


class Levels(NamedTuple):
    """Describe what remains in a tenant's two buckets, in units of `1 / UNIT` of a request or a token; negative
    for a debt.

    `requests`, `tokens`: the level of each bucket; None where the tenant has no such limit.
    """

    requests: int | None = None
    tokens: int | None = None


class Reservation(NamedTuple):
    """A reservation of `requests` requests and `tokens` tokens of a tenant's quota, as a gateway demands it.

    `id` must be unique over all gateways and all time. `force`: grant it even beyond the limits, because the tokens
    have been used already.
    """

    id: str
    requests: int
    tokens: int
    force: bool = False


class ReservationResult(NamedTuple):
    """Outcome of a reservation, with the levels of the tenant's buckets after it.

    `refused`: the name of the limit that the reservation would exceed (`REQUESTS`, `TOKENS` or `CONCURRENCY`); "" when
    it is granted. `wait_ms`: milliseconds until the bucket of that limit would suffice if no other request takes from
    it; 0 for the limit on concurrency, where the time is unknown.
    """

    levels: Levels
    refused: str = ""
    wait_ms: int = 0

    def require_granted(self, limits: QuotaLimits) -> None:
        """Raise RateLimitedError where the reservation was refused under `limits`."""
        if self.refused:
            raise RateLimitedError(self, limits)


@dataclass(slots=True)
class _Reservation:
    """An open reservation: `charged` tokens are taken, of which `used` were reported, so used <= charged."""

    requests: int
    charged: int
    used: int
    expires_ms: int


class TenantQuota:
    """Account for one tenant's quota: grant reservations, and settle them with the actual use. Times are in
    milliseconds.

    Each call takes the current `limits`, the time `now_ms`, and `ttl_ms`, after which a reservation that is not renewed
    expires; the next call on the quota then settles it with its last reported use. `levels` (what remains in the
    tenant's buckets) and `open` (the reservations by id) are for reading.

    A clock that goes back by up to MAX_BACK_MS counts as stopped: until it has caught up, the buckets are not refilled.
    When it goes back by more, accounting continues from the new time; the buckets keep what they hold, and open
    reservations expire at most `ttl_ms` later.
    """

    def __init__(self, levels: Levels | None = None, now_ms: int = 0) -> None:
        """Create a quota whose buckets hold `levels` at the time `now_ms`; None: full buckets under the limits that the
        first call passes."""
        self.levels = levels or Levels()
        self.open: dict[str, _Reservation] = {}
        self._at_ms = now_ms
        self._limits = QuotaLimits()

    def reserve(self, request: Reservation, limits: QuotaLimits, now_ms: int, ttl_ms: int) -> ReservationResult:
        """Reserve all that `request` demands, or nothing if a limit would be exceeded, and return the outcome.

        When a reservation with the same id is open already, it is granted again, and nothing more is taken.
        """
        now = self._advance(limits, now_ms, ttl_ms)
        if request.id in self.open:
            return ReservationResult(self.levels)
        refused, wait = ("", 0) if request.force else self._exceeded_limit(request, limits)
        if refused:
            return ReservationResult(self.levels, refused, wait)
        self._add(-request.requests, -request.tokens)
        self.open[request.id] = _Reservation(request.requests, request.tokens, 0, now + ttl_ms)
        return ReservationResult(self.levels)

    def renew(self, used: Mapping[str, int], limits: QuotaLimits, now_ms: int, ttl_ms: int) -> list[str]:
        """Extend open reservations by `ttl_ms` from now, and return the ids in `used` that are not open any more.

        `used` maps the id of each reservation to the tokens that it has used so far; tokens beyond those reserved are
        taken from the bucket immediately.
        """
        now = self._advance(limits, now_ms, ttl_ms)
        gone = []
        for name, num_used in used.items():
            reservation = self.open.get(name)
            if reservation is None:
                gone.append(name)
                continue
            reservation.used = max(reservation.used, num_used)
            self._add(0, min(0, reservation.charged - reservation.used))
            reservation.charged = max(reservation.charged, reservation.used)
            reservation.expires_ms = now + ttl_ms
        return gone

    def settle(self, name: str, used: int | None, limits: QuotaLimits, now_ms: int, ttl_ms: int) -> bool:
        """End the reservation with the id `name`: return the tokens that it reserved but did not use to the bucket, or
        take those that it used beyond its reservation.

        `used`: the tokens that its request has used in total. None: the request was not begun, so that all reserved
        requests and tokens return to the buckets. Returns False, and changes nothing, when the reservation is not open,
        for example because it has expired.
        """
        self._advance(limits, now_ms, ttl_ms)
        reservation = self.open.pop(name, None)
        if reservation is None:
            return False
        self._add(reservation.requests if used is None else 0, reservation.charged - (used or 0))
        return True

    def check(self) -> None:
        """Verify, for tests, that no bucket is over capacity and no open reservation has used more than it took. Raises
        AssertionError with a message about the first mismatch."""
        for level, limit in zip(self.levels, self._limits, strict=False):
            assert level is None or level <= capacity(limit), f"{self!r} has more than {limit}"
        for name, reservation in self.open.items():
            assert 0 <= reservation.used <= reservation.charged, (
                f"{name} used {reservation.used} of {reservation.charged}"
            )

    def __repr__(self) -> str:
        return f"<quota {self.levels} at {self._at_ms} ms, {len(self.open)} open>"

    # ---- accounting

    def _advance(self, limits: QuotaLimits, now_ms: int, ttl_ms: int) -> int:
        """Refill the buckets up to now and settle expired reservations; return the effective time."""
        if now_ms < self._at_ms - MAX_BACK_MS:
            self._at_ms = now_ms
            for reservation in self.open.values():
                reservation.expires_ms = min(reservation.expires_ms, now_ms + ttl_ms)
        elapsed = max(0, now_ms - self._at_ms)
        self._at_ms = max(now_ms, self._at_ms)
        self._limits = limits
        self._add(0, 0, elapsed)
        late = [
            (reservation.expires_ms, name.encode())
            for name, reservation in self.open.items()
            if reservation.expires_ms <= self._at_ms
        ]
        for _, name in sorted(late)[:MAX_SWEEP]:
            reservation = self.open.pop(name.decode())
            self._add(0, reservation.charged - reservation.used)
        return self._at_ms

    def _exceeded_limit(self, request: Reservation, limits: QuotaLimits) -> tuple[str, int]:
        """Return the exceeded limit with the longest wait, and that wait in milliseconds; ("", 0) when none is
        exceeded."""
        waits = [
            (wait_ms(level, limit, needed * UNIT), name)
            for name, level, limit, needed in (
                (REQUESTS, self.levels.requests, limits.requests_per_minute, request.requests),
                (TOKENS, self.levels.tokens, limits.tokens_per_minute, request.tokens),
            )
            if level is not None
        ]
        longest, name = max(waits, key=lambda pair: pair[0], default=(0, ""))
        if longest:
            return name, longest
        is_crowded = 0 < limits.max_concurrency <= len(self.open)
        return (CONCURRENCY, 0) if is_crowded else ("", 0)

    def _add(self, requests: int, tokens: int, elapsed_ms: int = 0) -> None:
        """Refill the buckets for `elapsed_ms`, and add to them or take from them; a full bucket stays full."""
        self.levels = Levels(
            _level(self.levels.requests, self._limits.requests_per_minute, elapsed_ms, requests),
            _level(self.levels.tokens, self._limits.tokens_per_minute, elapsed_ms, tokens),
        )


def _level(level: int | None, limit: int, elapsed_ms: int, added: int) -> int | None:
    if not limit:
        return None
    return capacity(limit) if level is None else refill(level + added * UNIT, limit, elapsed_ms)


def capacity(limit: int) -> int:
    """Return the level of a full bucket, in units, for a `limit` per minute."""
    return limit * UNIT


def refill(level: int, limit: int, elapsed_ms: int) -> int:
    """Return the level, in units, of a bucket that had `level` units before it was refilled for `elapsed_ms`
    milliseconds.

    `limit`: the bucket's limit per minute, which determines how fast it fills; the result is at most the level of a
    full bucket.
    """
    return min(capacity(limit), level + limit * elapsed_ms)


def wait_ms(level: int, limit: int, needed: int) -> int:
    """Return the milliseconds until a bucket at `level` units reaches `needed` units; 0 when it already has.

    `limit`: the bucket's limit per minute. `needed` must not exceed the capacity.
    """
    return max(0, -((level - needed) // limit))


class RateLimitedError(TandemError):
    """Error (QUOTA) for a request that a limit of its tenant's quota does not allow now, with the time after which the
    client may retry.

    `levels`: what remained in the tenant's buckets when the request was refused. `limits`: the limits that were
    applied. The response's rate limit headers contain both."""

    def __init__(self, result: ReservationResult, limits: QuotaLimits) -> None:
        limit = dict(zip(_WORDS, limits, strict=True))[result.refused]
        wait_s = result.wait_ms / 1000 or 1.0
        message = f"your tenant's limit of {limit} {_WORDS[result.refused]} is reached; retry in {wait_s:.3g} s"
        super().__init__(ErrorKind.QUOTA, message, retry_after_s=wait_s, reason=result.refused)
        self.levels = result.levels
        self.limits = limits
