"""Define the kinds of request failure and their HTTP, gRPC and OpenAI representations."""

from __future__ import annotations

from enum import Enum


class ErrorKind(Enum):
    """Kind of a failure. Its value is the machine-readable reason that clients see, which stays the same across
    versions.

    `http`: the HTTP status of the response. `grpc`: the name of the gRPC status code. `openai_type`: the `type` in
    OpenAI's error body.
    """

    _value_: str
    http: int
    grpc: str
    openai_type: str

    INVALID_REQUEST = "invalid_request", 400, "INVALID_ARGUMENT", "invalid_request_error"
    CONTEXT_LENGTH = "context_length_exceeded", 400, "INVALID_ARGUMENT", "invalid_request_error"
    UNSUPPORTED = "unsupported", 400, "UNIMPLEMENTED", "invalid_request_error"
    MODEL_NOT_FOUND = "model_not_found", 404, "NOT_FOUND", "invalid_request_error"
    NOT_FOUND = "not_found", 404, "NOT_FOUND", "invalid_request_error"
    METHOD_NOT_ALLOWED = "method_not_allowed", 405, "UNIMPLEMENTED", "invalid_request_error"
    BODY_TOO_LARGE = "body_too_large", 413, "INVALID_ARGUMENT", "invalid_request_error"
    HEADERS_TOO_LARGE = "headers_too_large", 431, "INVALID_ARGUMENT", "invalid_request_error"
    REQUEST_TIMEOUT = "request_timeout", 408, "DEADLINE_EXCEEDED", "invalid_request_error"
    MISDIRECTED = "misdirected_request", 421, "INVALID_ARGUMENT", "invalid_request_error"
    UNAUTHENTICATED = "unauthenticated", 401, "UNAUTHENTICATED", "authentication_error"
    FORBIDDEN = "forbidden", 403, "PERMISSION_DENIED", "permission_error"
    QUOTA = "quota_exceeded", 429, "RESOURCE_EXHAUSTED", "rate_limit_error"
    SLO_MISS = "predicted_slo_miss", 503, "UNAVAILABLE", "overloaded_error"
    OVERLOADED = "overloaded", 503, "UNAVAILABLE", "overloaded_error"
    NO_WORKER = "no_worker", 503, "UNAVAILABLE", "server_error"
    DRAINING = "draining", 503, "UNAVAILABLE", "server_error"
    WORKER_LOST = "worker_lost", 502, "UNAVAILABLE", "server_error"
    KV_LOST = "kv_lost", 502, "UNAVAILABLE", "server_error"
    DEADLINE = "deadline_exceeded", 504, "DEADLINE_EXCEEDED", "server_error"
    CANCELLED = "cancelled", 499, "CANCELLED", "invalid_request_error"
    INTERNAL = "internal", 500, "INTERNAL", "server_error"

    def __new__(cls, reason: str, http: int, grpc: str, openai_type: str) -> ErrorKind:
        kind = object.__new__(cls)
        kind._value_ = reason
        kind.http = http
        kind.grpc = grpc
        kind.openai_type = openai_type
        return kind

    @property
    def value(self) -> str:  # mypy takes the type of an enumeration's value as unknown where there is a `__new__`
        return self._value_


class TandemError(Exception):
    """A failure with a kind, which clients see with its HTTP or gRPC status.

    `param`: name of the request field that is wrong; None if no field is. `retry_after_s`: seconds after which a retry
    may succeed; None if this is unknown. `reason`: cause within the kind, for programs, such as the limit that refused
    the request (`requests_per_minute`, `queue_full`, ...); empty where no cause is named.
    """

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

    def __repr__(self) -> str:
        return f"TandemError({self.kind.value}: {self.message})"


def invalid_request(message: str, param: str | None = None) -> TandemError:
    """Return, without raising it, the TandemError(INVALID_REQUEST) with this message. `param`: name of the request
    field that is wrong; None if no field is."""
    return TandemError(ErrorKind.INVALID_REQUEST, message, param=param)
