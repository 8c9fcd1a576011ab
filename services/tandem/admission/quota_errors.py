"""Build the errors for requests that a tenant's quota does not allow."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.admission.quota import CONCURRENCY, REQUESTS, TOKENS, QuotaLimits, ReservationResult
from tandem.core.errors import ErrorKind, TandemError

_WORDS = {
    REQUESTS: "requests per minute",
    TOKENS: "tokens per minute",
    CONCURRENCY: "requests at once",
}


class RateLimitedError(TandemError):
    """Refuse a request because of a quota (QUOTA), with the time after which the client may retry.

    `levels` and `limits` are those of the tenant's buckets at that moment, from which clients know when to retry."""

    def __init__(self, result: ReservationResult, limits: QuotaLimits) -> None:
        limit = {
            REQUESTS: limits.requests_per_minute,
            TOKENS: limits.tokens_per_minute,
            CONCURRENCY: limits.max_concurrency,
        }[result.refused]
        wait_s = result.wait_ms / 1000 or 1.0
        message = f"your tenant's limit of {limit} {_WORDS[result.refused]} is reached; retry in {wait_s:.3g} s"
        super().__init__(ErrorKind.QUOTA, message, retry_after_s=wait_s, reason=result.refused)
        self.levels = result.levels
        self.limits = limits


def exceeds_limit_error(limits: QuotaLimits, num_tokens: int) -> TandemError:
    """Return the INVALID_REQUEST error for a prompt of `num_tokens`, more than the tenant's tokens per minute.

    It is not a 429, because clients would retry, and the prompt can never be admitted.
    """
    message = f"the prompt has {num_tokens} tokens, more than the {limits.tokens_per_minute} per minute of this key"
    return TandemError(ErrorKind.INVALID_REQUEST, message, param="prompt", reason=TOKENS)


def batch_exceeds_limit_error(limits: QuotaLimits, charges: Sequence[int]) -> TandemError | None:
    """Return the INVALID_REQUEST error for a request with several prompts that even an unused quota would not admit;
    None where it would.

    `charges`: tokens that each prompt would reserve; the prompts are admitted all or none. Waiting does not help; fewer
    prompts do, and against a token limit also a smaller `max_tokens`.
    """
    for name, limit in ((REQUESTS, limits.requests_per_minute), (CONCURRENCY, limits.max_concurrency)):
        if 0 < limit < len(charges):
            message = (
                f"{len(charges)} prompts count as {len(charges)} requests, and this key may have {limit} {_WORDS[name]}"
            )
            return TandemError(ErrorKind.INVALID_REQUEST, message, param="prompt", reason=name)
    if 0 < limits.tokens_per_minute < sum(charges):
        message = (
            f"the {len(charges)} prompts and the output that is expected of them reserve {sum(charges)} tokens, "
            f"and this key may use {limits.tokens_per_minute} per minute"
        )
        return TandemError(ErrorKind.INVALID_REQUEST, message, param="prompt", reason=TOKENS)
    return None
