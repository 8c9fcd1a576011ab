"""Make the errors of requests that their tenant's quotas refuse."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.admission.quota import CONCURRENCY, REQUESTS, TOKENS, QuotaLimits, ReservationResult
from tandem.core.errors import ErrorKind, TandemError

_WORDS = {
    REQUESTS: "requests per minute",
    TOKENS: "tokens per minute",
    CONCURRENCY: "requests at once",
}


def exceeds_limit_error(limits: QuotaLimits, num_tokens: int) -> TandemError:
    """Return the error for a prompt longer than a minute's tokens. Not a 429: clients would retry, and the prompt can
    never be admitted."""
    message = f"the prompt has {num_tokens} tokens, and this key may use {limits.tokens_per_minute} per minute"
    return TandemError(ErrorKind.INVALID_REQUEST, message, param="prompt", reason=TOKENS)


def batch_exceeds_limit_error(limits: QuotaLimits, charges: Sequence[int]) -> TandemError | None:
    """Return the error for the prompts of one body, which are admitted all or none; None where an unused quota admits
    them.

    `charges` are the tokens that each would reserve. Waiting does not help; fewer prompts do, and against a token limit
    also a smaller `max_tokens`.
    """
    for name, limit in ((REQUESTS, limits.requests_per_minute), (CONCURRENCY, limits.max_concurrency)):
        if 0 < limit < len(charges):
            message = f"the {len(charges)} prompts are as many requests, and this key may have {limit} {_WORDS[name]}"
            return TandemError(ErrorKind.INVALID_REQUEST, message, param="prompt", reason=name)
    if 0 < limits.tokens_per_minute < sum(charges):
        message = (
            f"the {len(charges)} prompts and the output that is expected of them reserve {sum(charges)} tokens, "
            f"and this key may use {limits.tokens_per_minute} per minute"
        )
        return TandemError(ErrorKind.INVALID_REQUEST, message, param="prompt", reason=TOKENS)
    return None


def rate_limited_error(result: ReservationResult, limits: QuotaLimits) -> TandemError:
    limit = {
        REQUESTS: limits.requests_per_minute,
        TOKENS: limits.tokens_per_minute,
        CONCURRENCY: limits.max_concurrency,
    }[result.refused]
    message = f"this key's limit of {limit} {_WORDS[result.refused]} is reached"
    wait_s = result.wait_ms / 1000 or 1.0
    return TandemError(ErrorKind.QUOTA, message, retry_after_s=wait_s, reason=result.refused)
