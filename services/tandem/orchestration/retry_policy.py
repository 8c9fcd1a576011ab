"""Classify worker failures that a retry may avoid, and make the error when retries are exhausted."""

from __future__ import annotations

from tandem.core.errors import ErrorKind, TandemError

CAPACITY_ERRORS = frozenset({ErrorKind.OVERLOADED, ErrorKind.DRAINING, ErrorKind.WORKER_LOST, ErrorKind.CANCELLED})
"""Rejections of a job that cost nothing but its place. CANCELLED: by a prefill worker, whose decode worker has given up
its reservation in the meantime, for example to drain, and notified the prefill worker first."""
RETRYABLE = CAPACITY_ERRORS | {ErrorKind.KV_LOST, ErrorKind.INTERNAL}
"""Failures that another worker, or the same one later, may not repeat. INTERNAL is a failed step, perhaps caused by
this request: the limit on attempts keeps it from failing on all workers forever."""
BLAMED = frozenset({ErrorKind.KV_LOST, ErrorKind.INTERNAL})
"""Failures that count against the worker that reports them."""


def retries_exhausted_error(error: TandemError, num_attempts: int) -> TandemError:
    """Return the final error of a request whose last attempt failed with `error`."""
    if num_attempts == 1:
        return error
    return TandemError(error.kind, f"{error.message}; {num_attempts} attempts in a row came to nothing")
