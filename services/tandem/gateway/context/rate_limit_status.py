"""How a tenant stands with its limits, as a value, as headers and with a refusal; never counts what it uses."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.errors import TandemError


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimitStatus:
    """What a tenant may still do, for `x-ratelimit-*`; None where there is no limit. Seconds until the limit is whole
    again."""

    limit_requests: int | None = None
    remaining_requests: int | None = None
    reset_requests_s: float = 0.0
    limit_tokens: int | None = None
    remaining_tokens: int | None = None
    reset_tokens_s: float = 0.0


class RateLimitedError(TandemError):
    """A refusal, with how the tenant stood when it was made: clients pace themselves by that."""

    def __init__(self, error: TandemError, standing: RateLimitStatus) -> None:
        super().__init__(error.kind, error.message, retry_after_s=error.retry_after_s, reason=error.reason)
        self.standing = standing


def standing_headers(standing: RateLimitStatus) -> list[tuple[bytes, bytes]]:
    """OpenAI's `x-ratelimit-*`, for what is limited."""
    found: list[tuple[bytes, bytes]] = []
    for what, limit, remaining, reset_s in (
        (b"requests", standing.limit_requests, standing.remaining_requests, standing.reset_requests_s),
        (b"tokens", standing.limit_tokens, standing.remaining_tokens, standing.reset_tokens_s),
    ):
        if limit is not None:
            found += [
                (b"x-ratelimit-limit-" + what, str(limit).encode()),
                (b"x-ratelimit-remaining-" + what, str(max(0, remaining or 0)).encode()),
                (b"x-ratelimit-reset-" + what, duration(reset_s).encode()),
            ]
    return found


def refused_headers(error: TandemError) -> list[tuple[bytes, bytes]]:
    """Of a refusal for a quota; none of any other error."""
    return standing_headers(error.standing) if isinstance(error, RateLimitedError) else []


def duration(seconds: float) -> str:
    """As OpenAI writes one: `120ms`, `1s`, `6m0s`, `1h0m0s`; never shorter than it is."""
    millis = -int(-max(0.0, seconds) * 1000 // 1)
    if millis < 1000:
        return f"{millis}ms"
    whole = -(-millis // 1000)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours}h{minutes}m{whole % 60}s"
    return f"{minutes}m{whole % 60}s" if minutes else f"{whole}s"
