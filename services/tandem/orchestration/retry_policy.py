"""Which failures of a worker another may not repeat, and what is said when it was tried often enough; never retries."""

from __future__ import annotations

from tandem.core.errors import ErrorKind, TandemError

CAPACITY_ERRORS = frozenset({ErrorKind.OVERLOADED, ErrorKind.DRAINING, ErrorKind.WORKER_LOST, ErrorKind.CANCELLED})
"""Why a job was not taken that has cost nothing but its place. CANCELLED: by a worker that was to prefill, because the
one that was to decode has given its booking up by then, as one that drains does, and told it first."""
RETRYABLE = CAPACITY_ERRORS | {ErrorKind.KV_LOST, ErrorKind.INTERNAL}
"""What another worker, or the same one later, may not repeat. INTERNAL is a step that failed, perhaps by this request:
a bound on attempts keeps it from failing everywhere for ever."""
BLAMED = frozenset({ErrorKind.KV_LOST, ErrorKind.INTERNAL})
"""What tells against a worker that reports it."""


def retries_exhausted_error(error: TandemError, num_attempts: int) -> TandemError:
    """The end of a request whose last attempt failed with `error`."""
    if num_attempts == 1:
        return error
    return TandemError(error.kind, f"{error.message}; {num_attempts} attempts in a row came to nothing")
