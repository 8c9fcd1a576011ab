"""What a request that its tenant's quotas do not let in is told; never asks a quota."""

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
    """Of a prompt beyond any minute's worth. No 429: clients repeat those, and this one would never be let in."""
    message = f"the prompt has {num_tokens} tokens, and this key may use {limits.tokens_per_minute} per minute"
    return TandemError(ErrorKind.INVALID_REQUEST, message, param="prompt", reason=TOKENS)


def batch_exceeds_limit_error(limits: QuotaLimits, charges: Sequence[int]) -> TandemError | None:
    """Of the prompts of one body, which are let in all or none; `charges` are the tokens that each would reserve. None
    where a key that has used nothing is let in with them. Waiting does not help; fewer prompts do, and against a limit
    of tokens a smaller `max_tokens`."""
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


def rate_limited_error(verdict: ReservationResult, limits: QuotaLimits) -> TandemError:
    limit = {
        REQUESTS: limits.requests_per_minute,
        TOKENS: limits.tokens_per_minute,
        CONCURRENCY: limits.max_concurrency,
    }[verdict.refused]
    message = f"this key's limit of {limit} {_WORDS[verdict.refused]} is reached"
    wait_s = verdict.wait_ms / 1000 or 1.0
    return TandemError(ErrorKind.QUOTA, message, retry_after_s=wait_s, reason=verdict.refused)
