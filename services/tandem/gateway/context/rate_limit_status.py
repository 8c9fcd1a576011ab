"""Describe what a tenant may still use of its rate limits, as a value, as response headers and with a refusal."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.errors import TandemError


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimitStatus:
    """Limits of one tenant per minute and what is left of them; the values of the headers `x-ratelimit-*`.

    `limit_*` and `remaining_*`: requests or tokens; None where the tenant has no such limit. `reset_*_s`: seconds until
    the whole limit is available again."""

    limit_requests: int | None = None
    remaining_requests: int | None = None
    reset_requests_s: float = 0.0
    limit_tokens: int | None = None
    remaining_tokens: int | None = None
    reset_tokens_s: float = 0.0


class RateLimitedError(TandemError):
    """Refusal by a rate limit; `rate_limits` is the tenant's status at that moment, by which clients pace
    themselves."""

    def __init__(self, error: TandemError, status: RateLimitStatus) -> None:
        super().__init__(error.kind, error.message, retry_after_s=error.retry_after_s, reason=error.reason)
        self.rate_limits = status


def rate_limit_headers(status: RateLimitStatus) -> dict[str, str]:
    """Return OpenAI's headers `x-ratelimit-*` for those quantities that the tenant has a limit of."""
    headers: dict[str, str] = {}
    for quantity, limit, remaining, reset_s in (
        ("requests", status.limit_requests, status.remaining_requests, status.reset_requests_s),
        ("tokens", status.limit_tokens, status.remaining_tokens, status.reset_tokens_s),
    ):
        if limit is not None:
            headers[f"x-ratelimit-limit-{quantity}"] = str(limit)
            headers[f"x-ratelimit-remaining-{quantity}"] = str(max(0, remaining or 0))
            headers[f"x-ratelimit-reset-{quantity}"] = duration(reset_s)
    return headers


def refusal_headers(error: TandemError) -> dict[str, str]:
    """Return the `x-ratelimit-*` headers of a refusal by a rate limit, and none for any other error."""
    return rate_limit_headers(error.rate_limits) if isinstance(error, RateLimitedError) else {}


def duration(seconds: float) -> str:
    """Format a duration as OpenAI does, rounded up: `120ms`, `1s`, `6m0s`, `1h0m0s`."""
    millis = -int(-max(0.0, seconds) * 1000 // 1)
    if millis < 1000:
        return f"{millis}ms"
    whole = -(-millis // 1000)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours}h{minutes}m{whole % 60}s"
    return f"{minutes}m{whole % 60}s" if minutes else f"{whole}s"
