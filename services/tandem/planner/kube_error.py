"""Define the error of a failed call to a Kubernetes API server."""

from __future__ import annotations

from http import HTTPStatus

_TRANSIENT = frozenset({
    HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT,
})  # fmt: skip


class KubeError(Exception):
    """Failure of one call. `status`: HTTP status; 0 if no answer arrived, so that the effect of the call is unknown.
    `retry_after_s`: delay that the server requests."""

    def __init__(self, status: int, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{status or 'no answer'}: {message}")
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s

    @property
    def is_conflict(self) -> bool:
        """Return whether the object has changed since it was read; a JSON Patch whose test fails reports that too."""
        return self.status in (HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY)

    @property
    def is_gone(self) -> bool:
        """Return whether the version from which a watch was to continue is too old."""
        return self.status == HTTPStatus.GONE

    @property
    def is_transient(self) -> bool:
        """Return whether the same call may succeed later."""
        return self.status == 0 or self.status in _TRANSIENT

    @property
    def label(self) -> str:
        """Return the metric label of the error."""
        return str(int(self.status)) if self.status else "no_answer"
