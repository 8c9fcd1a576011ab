"""Tell clients what is left of their tenant's rate limits, in response headers."""

from __future__ import annotations

from tandem.admission.quota import UNIT, Levels, QuotaLimits, capacity, wait_ms


def rate_limit_headers(levels: Levels, limits: QuotaLimits) -> dict[str, str]:
    """Return the response headers `x-ratelimit-*`, as OpenAI defines them, for each limit per minute that a tenant has:
    on requests, on tokens, or both.

    `levels`: what the tenant's buckets hold now. `limits`: the tenant's limits. The headers of a limit are the limit
    per minute (`limit`), the whole requests or tokens left (`remaining`; 0 for a bucket below zero), and the time until
    the bucket is full again (`reset`)."""
    headers: dict[str, str] = {}
    for quantity, level, limit in zip(levels._fields, levels, limits, strict=False):
        if level is not None and limit:
            headers[f"x-ratelimit-limit-{quantity}"] = str(limit)
            headers[f"x-ratelimit-remaining-{quantity}"] = str(max(0, level // UNIT))
            headers[f"x-ratelimit-reset-{quantity}"] = duration(wait_ms(level, limit, capacity(limit)) / 1000)
    return headers


def duration(seconds: float) -> str:
    """Format a duration in seconds as OpenAI's headers do, rounded up: `120ms`, `1s`, `6m0s`, `1h0m0s`."""
    millis = -int(-max(0.0, seconds) * 1000 // 1)
    if millis < 1000:
        return f"{millis}ms"
    whole = -(-millis // 1000)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours}h{minutes}m{whole % 60}s"
    return f"{minutes}m{whole % 60}s" if minutes else f"{whole}s"
