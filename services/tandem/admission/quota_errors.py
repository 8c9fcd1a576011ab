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
    """Error (QUOTA) for a request that a limit of its tenant's quota does not allow now, with the time after which the
    client may retry.

    `levels`: what remained in the tenant's buckets when the request was refused. `limits`: the limits that were
    applied. The response's rate limit headers contain both."""

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
    """Return the INVALID_REQUEST error for a prompt of `num_tokens` tokens, which is longer than the tokens per minute
    in `limits`.

    Its HTTP status is not 429, because clients would retry, and the prompt can never be admitted.
    """
    message = f"the prompt has {num_tokens} tokens, more than the {limits.tokens_per_minute} per minute of this key"
    return TandemError(ErrorKind.INVALID_REQUEST, message, param="prompt", reason=TOKENS)


def batch_exceeds_limit_error(limits: QuotaLimits, charges: Sequence[int]) -> TandemError | None:
    """Return the INVALID_REQUEST error for a request with several prompts that even an unused quota would not admit;
    None where an unused quota would admit it.

    `charges`: for each prompt, the tokens that it would reserve; the prompts are admitted all or none. To be admitted,
    the client has to send fewer prompts, or, if the limit on tokens is exceeded, a smaller `max_tokens`; waiting does
    not help.
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
