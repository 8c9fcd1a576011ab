"""Check OpenTelemetry's environment variables, and read those that the SDK leaves to its caller.

https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/ defines the variables. The SDK and its
exporters read most of them themselves, but warn and use a default where a value is invalid; here such a value keeps the
program from starting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from tandem.core.errors import ErrorKind, TandemError

Signal = Literal["traces", "metrics"]
Exporter = Literal["otlp", "console"]
Protocol = Literal["grpc", "http/protobuf"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OtelSettings:
    """Settings of OpenTelemetry that Tandem itself uses.

    `traces`, `metrics`: names of the exporters of spans and of metrics; empty where neither the exporter variable nor
    an endpoint is set, or the SDK is disabled. `traces_protocol`, `metrics_protocol`: the protocol of the `otlp`
    exporter of each. `metrics_interval_s`: seconds between two exports of metrics, each of which may take
    `metrics_timeout_s` seconds. `max_spans`: how many ended spans may wait to be sent.
    """

    traces: tuple[Exporter, ...]
    metrics: tuple[Exporter, ...]
    traces_protocol: Protocol
    metrics_protocol: Protocol
    metrics_interval_s: float
    metrics_timeout_s: float
    max_spans: int


class _Rule(NamedTuple):
    """Rule for the value of a variable: the `type` to which `msgspec` must be able to convert the value in lower case,
    and the `expected` value in words, for errors."""

    type: Any
    expected: str


_POSITIVE = _Rule(Annotated[float, Meta(gt=0, lt=1e15)], "a number above 0")
_COUNT = _Rule(Annotated[str, Meta(pattern="^[0-9]*[1-9][0-9]*$")], "a whole number above 0")
_LIMIT = _Rule(Annotated[str, Meta(pattern="^[0-9]+$")], "a whole number")
_BOOLEAN = _Rule(Literal["true", "false"], "true or false")
_SHARE = _Rule(Annotated[float, Meta(ge=0, le=1)], "a ratio from 0 to 1")
_SAMPLER = _Rule(
    Annotated[str, Meta(pattern="^(parentbased_)?(always_on|always_off|traceidratio)$")],
    "always_on, always_off or traceidratio, which parentbased_ may precede",
)
_PROTOCOL = _Rule(Protocol, "grpc or http/protobuf")
_COMPRESSION = _Rule(Literal["none", "gzip", "deflate"], "none, gzip or deflate")
# `none`, the default, is not accepted by the SDK's gRPC exporter.
_GRPC_COMPRESSION = _Rule(Literal["gzip"], "gzip, with gRPC")
_TEMPORALITY = _Rule(Literal["cumulative"], "cumulative")
_AGGREGATION = _Rule(Literal["explicit_bucket_histogram"], "explicit_bucket_histogram")
_NAMES: dict[Signal, Any] = {
    "traces": _Rule(list[Literal["otlp", "console", "none"]], "some of otlp, console and none"),
    # /metrics is always served, whether `prometheus` is given or not.
    "metrics": _Rule(
        list[Literal["otlp", "console", "none", "prometheus"]], "some of otlp, console, none and prometheus"
    ),
}


def read_otel(environ: Mapping[str, str]) -> OtelSettings:
    """Check OpenTelemetry's variables in `environ` and return the settings. Raises TandemError(INVALID_REQUEST) naming
    a variable with an invalid value."""
    traces, metrics = _exporters("traces", environ), _exporters("metrics", environ)
    if traces or metrics:
        _check_pairs("OTEL_RESOURCE_ATTRIBUTES", environ)
    if traces:
        _check_spans(environ)
    if "otlp" in traces:
        _check_otlp("traces", environ)
    if "otlp" in metrics:
        _check_otlp("metrics", environ)
    # The exporters read this variable only; the Python SDK takes it in seconds, unlike the specification.
    own_timeouts_s = [_read(name, _POSITIVE, 0, environ) for name in _otlp("TIMEOUT", "metrics") if environ.get(name)]
    timeout_s = _read("OTEL_METRIC_EXPORT_TIMEOUT", _POSITIVE, 30_000, environ) / 1000
    return OtelSettings(
        traces=traces,
        metrics=metrics,
        traces_protocol=_protocol("traces", environ),
        metrics_protocol=_protocol("metrics", environ),
        metrics_interval_s=_read("OTEL_METRIC_EXPORT_INTERVAL", _POSITIVE, 60_000, environ) / 1000,
        metrics_timeout_s=min(timeout_s, *(own_timeouts_s or [10.0])[:1]),
        max_spans=int(_read("OTEL_BSP_MAX_QUEUE_SIZE", _COUNT, 2048, environ)),
    )


def _exporters(signal: Signal, environ: Mapping[str, str]) -> tuple[Exporter, ...]:
    if _read("OTEL_SDK_DISABLED", _BOOLEAN, "false", environ) == "true":
        return ()
    variable = f"OTEL_{signal.upper()}_EXPORTER"
    given = [name.strip() for name in environ.get(variable, "").split(",") if name.strip()]
    names = _convert(variable, _NAMES[signal], given)
    if not names and any(environ.get(name) for name in _otlp("ENDPOINT", signal)):
        return ("otlp",)
    return tuple(name for name in get_args(Exporter) if name in names)


def _protocol(signal: Signal, environ: Mapping[str, str]) -> Protocol:
    own, general = _otlp("PROTOCOL", signal)
    protocol: Protocol = _read(own, _PROTOCOL, _read(general, _PROTOCOL, "http/protobuf", environ), environ)
    return protocol


def _check_spans(environ: Mapping[str, str]) -> None:
    if "traceidratio" in _read("OTEL_TRACES_SAMPLER", _SAMPLER, "", environ):
        _read("OTEL_TRACES_SAMPLER_ARG", _SHARE, 1, environ)
    for name in ("OTEL_BSP_SCHEDULE_DELAY", "OTEL_BSP_EXPORT_TIMEOUT"):
        _read(name, _COUNT, 1, environ)
    for variable in environ:
        if variable.startswith("OTEL_") and variable.endswith("_LIMIT"):
            _read(variable, _LIMIT, 0, environ)
    max_batch, max_spans = "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", _read("OTEL_BSP_MAX_QUEUE_SIZE", _COUNT, 2048, environ)
    if int(_read(max_batch, _COUNT, 512, environ)) > int(max_spans):
        raise _invalid(
            max_batch, "it must be at most OTEL_BSP_MAX_QUEUE_SIZE, because a batch is taken from that queue"
        )


def _check_otlp(signal: Signal, environ: Mapping[str, str]) -> None:
    is_grpc = _protocol(signal, environ) == "grpc"
    for variable in _otlp("ENDPOINT", signal):
        _check_endpoint(variable, environ.get(variable, ""), is_grpc)
    for variable in _otlp("HEADERS", signal):
        _check_pairs(variable, environ)
    for suffix in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE"):
        for variable in _otlp(suffix, signal):
            if environ.get(variable) and not Path(environ[variable]).is_file():
                raise _invalid(variable, f"there is no file {environ[variable]}")
    compression = _GRPC_COMPRESSION if is_grpc else _COMPRESSION
    for suffix, rule in (("TIMEOUT", _POSITIVE), ("COMPRESSION", compression), ("INSECURE", _BOOLEAN)):
        for variable in _otlp(suffix, signal):
            _read(variable, rule, None, environ)
    if signal == "metrics":
        _read("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", _TEMPORALITY, "", environ)
        _read("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION", _AGGREGATION, "", environ)


def _check_endpoint(variable: str, value: str, is_grpc: bool) -> None:
    """Check that a value is a URL, whose scheme may be missing with gRPC."""
    try:
        parts = urlsplit(value if "://" in value or not is_grpc else f"https://{value}")
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if value and not is_url:
        raise _invalid(variable, f"{value!r} must be an http:// or https:// URL")


def _check_pairs(variable: str, environ: Mapping[str, str]) -> None:
    for pair in environ.get(variable, "").split(","):
        key, equals, _ = pair.partition("=")
        if pair.strip() and not (equals and key.strip()):
            raise _invalid(variable, "it must be a list of key=value separated by commas")


def _otlp(suffix: str, signal: Signal) -> tuple[str, str]:
    """Return the names of the signal's own variable, which has precedence, and of the general one."""
    return f"OTEL_EXPORTER_OTLP_{signal.upper()}_{suffix}", f"OTEL_EXPORTER_OTLP_{suffix}"


def _read(variable: str, rule: _Rule, default: Any, environ: Mapping[str, str]) -> Any:
    """Return a variable's value as the rule's type, in lower case; `default` where it is not set or empty."""
    value = environ.get(variable, "").strip().lower()
    return _convert(variable, rule, value) if value else default


def _convert(variable: str, rule: _Rule, value: str | list[str]) -> Any:
    """Return a value as the rule's type. The error does not repeat the value, which may be secret."""
    try:
        return msgspec.convert(value, rule.type, strict=False)
    except msgspec.ValidationError:
        raise _invalid(variable, f"it must be {rule.expected}") from None


def _invalid(variable: str, why: str) -> TandemError:
    return TandemError(ErrorKind.INVALID_REQUEST, f"{variable}: {why}", param=variable)
