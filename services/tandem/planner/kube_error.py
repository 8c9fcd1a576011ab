"""How a call to a Kubernetes API server can fail, as a value; never makes one."""

from __future__ import annotations

from http import HTTPStatus

_TRANSIENT = frozenset({
    HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT,
})  # fmt: skip


class KubeError(Exception):
    """`status` as HTTP has it; 0: no answer came, and whether a change was made is unknown. `retry_after_s`: as the
    server asks for."""

    def __init__(self, status: int, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{status or 'no answer'}: {message}")
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s

    @property
    def is_conflict(self) -> bool:
        """Somebody else has changed the object since it was read; a JSON Patch whose test fails says it so too."""
        return self.status in (HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY)

    @property
    def is_gone(self) -> bool:
        """The version from which a watch was to go on is too old."""
        return self.status == HTTPStatus.GONE

    @property
    def is_transient(self) -> bool:
        """The same may work later."""
        return self.status == 0 or self.status in _TRANSIENT

    @property
    def label(self) -> str:
        """For metrics."""
        return str(int(self.status)) if self.status else "no_answer"
