"""Define the kinds of request failure and their HTTP, gRPC and OpenAI representations."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ErrorKind(Enum):
    """Kinds of failure; each value is the machine-readable reason, stable across versions."""

    INVALID_REQUEST = "invalid_request"
    CONTEXT_LENGTH = "context_length_exceeded"
    UNSUPPORTED = "unsupported"
    MODEL_NOT_FOUND = "model_not_found"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    BODY_TOO_LARGE = "body_too_large"
    HEADERS_TOO_LARGE = "headers_too_large"
    REQUEST_TIMEOUT = "request_timeout"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    QUOTA = "quota_exceeded"
    OVERLOADED = "overloaded"
    SLO_MISS = "predicted_slo_miss"
    NO_WORKER = "no_worker"
    DRAINING = "draining"
    WORKER_LOST = "worker_lost"
    KV_LOST = "kv_lost"
    DEADLINE = "deadline_exceeded"
    CANCELLED = "cancelled"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class ErrorFacts:
    """How clients see an error kind: the HTTP status `http`, the gRPC status code name `grpc` and the `type` of
    OpenAI's error body."""

    http: int
    grpc: str
    openai_type: str


ERROR_TABLE: dict[ErrorKind, ErrorFacts] = {
    ErrorKind.INVALID_REQUEST: ErrorFacts(400, "INVALID_ARGUMENT", "invalid_request_error"),
    ErrorKind.CONTEXT_LENGTH: ErrorFacts(400, "INVALID_ARGUMENT", "invalid_request_error"),
    ErrorKind.UNSUPPORTED: ErrorFacts(400, "UNIMPLEMENTED", "invalid_request_error"),
    ErrorKind.MODEL_NOT_FOUND: ErrorFacts(404, "NOT_FOUND", "invalid_request_error"),
    ErrorKind.NOT_FOUND: ErrorFacts(404, "NOT_FOUND", "invalid_request_error"),
    ErrorKind.METHOD_NOT_ALLOWED: ErrorFacts(405, "UNIMPLEMENTED", "invalid_request_error"),
    ErrorKind.BODY_TOO_LARGE: ErrorFacts(413, "INVALID_ARGUMENT", "invalid_request_error"),
    ErrorKind.HEADERS_TOO_LARGE: ErrorFacts(431, "INVALID_ARGUMENT", "invalid_request_error"),
    ErrorKind.REQUEST_TIMEOUT: ErrorFacts(408, "DEADLINE_EXCEEDED", "invalid_request_error"),
    ErrorKind.UNAUTHENTICATED: ErrorFacts(401, "UNAUTHENTICATED", "authentication_error"),
    ErrorKind.FORBIDDEN: ErrorFacts(403, "PERMISSION_DENIED", "permission_error"),
    ErrorKind.QUOTA: ErrorFacts(429, "RESOURCE_EXHAUSTED", "rate_limit_error"),
    ErrorKind.SLO_MISS: ErrorFacts(503, "UNAVAILABLE", "overloaded_error"),
    ErrorKind.OVERLOADED: ErrorFacts(503, "UNAVAILABLE", "overloaded_error"),
    ErrorKind.NO_WORKER: ErrorFacts(503, "UNAVAILABLE", "server_error"),
    ErrorKind.DRAINING: ErrorFacts(503, "UNAVAILABLE", "server_error"),
    ErrorKind.WORKER_LOST: ErrorFacts(502, "UNAVAILABLE", "server_error"),
    ErrorKind.KV_LOST: ErrorFacts(502, "UNAVAILABLE", "server_error"),
    ErrorKind.DEADLINE: ErrorFacts(504, "DEADLINE_EXCEEDED", "server_error"),
    ErrorKind.CANCELLED: ErrorFacts(499, "CANCELLED", "invalid_request_error"),
    ErrorKind.INTERNAL: ErrorFacts(500, "INTERNAL", "server_error"),
}


class TandemError(Exception):
    """A failure with a kind. `param` names the offending field; `retry_after_s` is in seconds; `reason` is the
    machine-readable limit that refused a request (`requests_per_minute`, `queue_full`, ...)."""

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        reason: str = "",
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.reason = reason

    @property
    def facts(self) -> ErrorFacts:
        return ERROR_TABLE[self.kind]

    def __repr__(self) -> str:
        return f"TandemError({self.kind.value}: {self.message})"
