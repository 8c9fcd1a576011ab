"""Define the error of a failed call to a Kubernetes API server, and how long to wait after consecutive failures."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

_TRANSIENT = frozenset({
    HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT,
})  # fmt: skip


class KubeError(Exception):
    """Raised when a call to the Kubernetes API server fails.

    `status`: HTTP status; 0 if no answer arrived, so that the effect of the call is unknown. `retry_after_s`: seconds
    to wait as the server requests (Retry-After), None if it requests no delay. `is_invalid`: the server names fields of
    the object that it refuses, so that repeating the call cannot succeed."""

    def __init__(
        self, status: int, message: str, retry_after_s: float | None = None, *, is_invalid: bool = False
    ) -> None:
        super().__init__(f"{status or 'no answer'}: {message}")
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s
        self.is_invalid = is_invalid

    @property
    def is_conflict(self) -> bool:
        """Return whether the object has changed since it was read, or a test operation of a JSON Patch has failed.

        Reading the object again and repeating the call may then succeed. The server reports a failed test operation
        with status 422 and names no field."""
        unprocessable = self.status == HTTPStatus.UNPROCESSABLE_ENTITY and not self.is_invalid
        return self.status == HTTPStatus.CONFLICT or unprocessable

    @property
    def is_gone(self) -> bool:
        """Return whether a watch cannot continue because its resource version is too old.

        The objects must then be listed again."""
        return self.status == HTTPStatus.GONE

    @property
    def is_transient(self) -> bool:
        """Return whether the same call may succeed later: no answer arrived, or the server is overloaded or failing."""
        return self.status == 0 or self.status in _TRANSIENT

    @property
    def label(self) -> str:
        """Return the error as a label of metrics: "invalid", its HTTP status, or "no_answer"."""
        if self.is_invalid:
            return "invalid"
        return str(int(self.status)) if self.status else "no_answer"


MAX_RETRY_AFTER_S = 60.0
"""Longest delay requested by a server (Retry-After) that is respected."""


class Backoff:
    """Computes how long to wait after consecutive failures: delays that double from `first_s` to `most_s` seconds.

    Call `failed` after each failure and `worked` after a success. `random` returns numbers in [0, 1); up to half of a
    delay is taken off at random, so that clients that failed together do not retry together."""

    def __init__(self, random: Callable[[], float], first_s: float = 0.2, most_s: float = 10.0) -> None:
        self._random = random
        self._first_s = first_s
        self._most_s = most_s
        self.num_failures = 0

    def worked(self) -> None:
        self.num_failures = 0

    def failed(self, retry_after_s: float | None = None) -> float:
        """Count a failure and return the seconds to wait before the next try.

        `retry_after_s`: delay in seconds that the server requests. The result is at least as long, but a requested
        delay of more than MAX_RETRY_AFTER_S counts as MAX_RETRY_AFTER_S."""
        delay_s = min(self._most_s, self._first_s * 2.0**self.num_failures)
        self.num_failures = min(self.num_failures + 1, 64)
        return max(delay_s * (1 - self._random() / 2), min(retry_after_s or 0.0, MAX_RETRY_AFTER_S))
