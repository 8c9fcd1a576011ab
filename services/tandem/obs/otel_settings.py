"""Read OpenTelemetry's environment variables, and refuse values that are invalid or not supported.

https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/ defines the variables. The SDK and its
exporters read most of them themselves, but warn and use a default where a value is invalid; here such a value keeps the
program from starting."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from tandem.core.errors import ErrorKind, TandemError

Signal = Literal["traces", "metrics"]
Exporter = Literal["otlp", "console"]
Protocol = Literal["grpc", "http/protobuf"]

_EXPORTERS: dict[Signal, tuple[str, ...]] = {
    "traces": ("otlp", "console", "none"),
    "metrics": ("otlp", "console", "none", "prometheus"),
}
"""Exporters by signal. `prometheus` is accepted and changes nothing: /metrics is always served."""
_MAX_SPANS, _MAX_SPAN_BATCH = "OTEL_BSP_MAX_QUEUE_SIZE", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"
_RATIO_SAMPLERS = ("traceidratio", "parentbased_traceidratio")
_SAMPLERS = ("always_on", "always_off", "parentbased_always_on", "parentbased_always_off", *_RATIO_SAMPLERS)


class TraceSampling(NamedTuple):
    """Sample a share (`ratio`) of all traces; with `is_parent_based`, only of the traces that begin here."""

    ratio: float = 1.0
    is_parent_based: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class OtelSettings:
    """Settings of OpenTelemetry that Tandem itself uses.

    A signal has exporters only where its exporter variable or an endpoint is set. `metrics_timeout_s` bounds one export
    of metrics. At most `max_spans` spans wait; up to `max_span_batch` are sent at once, at the latest every
    `spans_delay_s`."""

    traces: tuple[Exporter, ...]
    metrics: tuple[Exporter, ...]
    traces_protocol: Protocol
    metrics_protocol: Protocol
    metrics_interval_s: float
    metrics_timeout_s: float
    max_spans: int
    max_span_batch: int
    spans_delay_s: float
    sampling: TraceSampling


def read_otel(environ: Mapping[str, str]) -> OtelSettings:
    """Return the settings. Raises TandemError(INVALID_REQUEST) naming a variable with an invalid value."""
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
    own_timeouts_s = [_number(name, environ, 0) for name in _otlp("TIMEOUT", "metrics") if environ.get(name)]
    timeout_s = _milliseconds("OTEL_METRIC_EXPORT_TIMEOUT", 30_000, environ) / 1000
    return OtelSettings(
        traces=traces,
        metrics=metrics,
        traces_protocol=_protocol("traces", environ),
        metrics_protocol=_protocol("metrics", environ),
        metrics_interval_s=_milliseconds("OTEL_METRIC_EXPORT_INTERVAL", 60_000, environ) / 1000,
        metrics_timeout_s=min(timeout_s, *(own_timeouts_s or [10.0])[:1]),
        max_spans=int(_number(_MAX_SPANS, environ, 2048)),
        max_span_batch=int(_number(_MAX_SPAN_BATCH, environ, 512)),
        spans_delay_s=_milliseconds("OTEL_BSP_SCHEDULE_DELAY", 5000, environ) / 1000,
        sampling=_sampling(environ) if traces else TraceSampling(),
    )


def _sampling(environ: Mapping[str, str]) -> TraceSampling:
    sampler = environ.get("OTEL_TRACES_SAMPLER", "").lower() or "parentbased_always_on"
    own = sampler.removeprefix("parentbased_")
    if own == "traceidratio":
        ratio = _number("OTEL_TRACES_SAMPLER_ARG", environ, 1)
    else:
        ratio = 1.0 if own == "always_on" else 0.0
    return TraceSampling(ratio, is_parent_based=own != sampler)


def _exporters(signal: Signal, environ: Mapping[str, str]) -> tuple[Exporter, ...]:
    if _is_true("OTEL_SDK_DISABLED", environ):
        return ()
    variable = f"OTEL_{signal.upper()}_EXPORTER"
    names = [name.strip() for name in environ.get(variable, "").split(",") if name.strip()]
    for name in names:
        if name not in _EXPORTERS[signal]:
            raise _invalid(variable, f"{name!r} is none of {', '.join(_EXPORTERS[signal])}")
    if not names and any(environ.get(name) for name in _otlp("ENDPOINT", signal)):
        return ("otlp",)
    exporters: tuple[Exporter, ...] = ("otlp", "console")
    return tuple(name for name in exporters if name in names)


def _protocol(signal: Signal, environ: Mapping[str, str]) -> Protocol:
    for variable in _otlp("PROTOCOL", signal):
        match environ.get(variable, "").strip():
            case "":
                continue
            case "grpc":
                return "grpc"
            case "http/protobuf":
                return "http/protobuf"
            case other:
                raise _invalid(variable, f"{other!r} is neither grpc nor http/protobuf")
    return "http/protobuf"


def _check_spans(environ: Mapping[str, str]) -> None:
    sampler = environ.get("OTEL_TRACES_SAMPLER", "")
    if sampler and sampler.lower() not in _SAMPLERS:
        raise _invalid("OTEL_TRACES_SAMPLER", f"{sampler!r} is none of {', '.join(_SAMPLERS)}")
    if sampler.lower() in _RATIO_SAMPLERS and not 0 <= _number("OTEL_TRACES_SAMPLER_ARG", environ, 1) <= 1:
        raise _invalid("OTEL_TRACES_SAMPLER_ARG", "a ratio is from 0 to 1")
    for name in ("SCHEDULE_DELAY", "EXPORT_TIMEOUT", "MAX_QUEUE_SIZE", "MAX_EXPORT_BATCH_SIZE"):
        _check_positive(f"OTEL_BSP_{name}", environ, whole=True)
    for variable, value in environ.items():
        if variable.startswith("OTEL_") and variable.endswith("_LIMIT") and not value.strip().isdecimal():
            raise _invalid(variable, f"{value!r} is no whole number")
    if _number(_MAX_SPAN_BATCH, environ, 512) > _number(_MAX_SPANS, environ, 2048):
        raise _invalid(_MAX_SPAN_BATCH, "a batch cannot be larger than the queue")


def _check_otlp(signal: Signal, environ: Mapping[str, str]) -> None:
    is_grpc = _protocol(signal, environ) == "grpc"
    checks: dict[str, Callable[[str, Mapping[str, str]], None]] = {
        "ENDPOINT": _check_grpc_endpoint if is_grpc else _check_url,
        "HEADERS": _check_pairs,
        "TIMEOUT": _check_positive,
        "COMPRESSION": _check_grpc_compression if is_grpc else _check_compression,
        "INSECURE": _check_boolean,
        "CERTIFICATE": _check_file,
        "CLIENT_KEY": _check_file,
        "CLIENT_CERTIFICATE": _check_file,
    }
    for suffix, check in checks.items():
        for variable in _otlp(suffix, signal):
            check(variable, environ)
    if signal == "metrics":
        _check_only("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "cumulative", environ)
        aggregation = "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION"
        _check_only(aggregation, "explicit_bucket_histogram", environ)


def _otlp(suffix: str, signal: Signal) -> tuple[str, str]:
    """Return the names of the signal's own variable, which has precedence, and of the general one."""
    return f"OTEL_EXPORTER_OTLP_{signal.upper()}_{suffix}", f"OTEL_EXPORTER_OTLP_{suffix}"


def _milliseconds(variable: str, default: float, environ: Mapping[str, str]) -> float:
    _check_positive(variable, environ)
    return _number(variable, environ, default)


def _invalid(variable: str, why: str) -> TandemError:
    return TandemError(ErrorKind.INVALID_REQUEST, f"{variable}: {why}", param=variable)


def _is_true(variable: str, environ: Mapping[str, str]) -> bool:
    value = environ.get(variable, "").strip().lower()
    if value not in ("", "true", "false"):
        raise _invalid(variable, f"{value!r} is neither true nor false")
    return value == "true"


def _check_boolean(variable: str, environ: Mapping[str, str]) -> None:
    _is_true(variable, environ)


def _number(variable: str, environ: Mapping[str, str], default: float) -> float:
    value = environ.get(variable, "")
    try:
        number = float(value) if value else default
    except ValueError:
        raise _invalid(variable, f"{value!r} is no number") from None
    if not math.isfinite(number):
        raise _invalid(variable, f"{value!r} is no number")
    return number


def _check_positive(variable: str, environ: Mapping[str, str], *, whole: bool = False) -> None:
    number = _number(variable, environ, 1)
    if number <= 0 or (whole and not environ.get(variable, "1").strip().isdecimal()):
        raise _invalid(variable, f"{environ[variable]!r} is no {'whole ' if whole else ''}number above 0")


def _check_pairs(variable: str, environ: Mapping[str, str]) -> None:
    """Check a key=value list; errors do not repeat the value, which may be secret."""
    for pair in environ.get(variable, "").split(","):
        key, equals, _ = pair.partition("=")
        if pair.strip() and not (equals and key.strip()):
            raise _invalid(variable, "it is a list of key=value, with commas between them")


def _check_url(variable: str, environ: Mapping[str, str]) -> None:
    value = environ.get(variable, "")
    if not value:
        return
    try:
        parts = urlsplit(value)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise _invalid(variable, f"{value!r} is no http:// or https:// URL")


def _check_grpc_endpoint(variable: str, environ: Mapping[str, str]) -> None:
    value = environ.get(variable, "")
    _check_url(variable, {variable: value if not value or "://" in value else f"https://{value}"})


def _check_compression(variable: str, environ: Mapping[str, str]) -> None:
    if environ.get(variable, "").strip().lower() not in ("", "none", "gzip", "deflate"):
        raise _invalid(variable, f"{environ[variable]!r} is none of none, gzip, deflate")


def _check_grpc_compression(variable: str, environ: Mapping[str, str]) -> None:
    """Accept gzip only: `none`, the default, is not accepted by the SDK's gRPC exporter."""
    _check_only(variable, "gzip", environ)


def _check_only(variable: str, only: str, environ: Mapping[str, str]) -> None:
    value = environ.get(variable, "")
    if value and value.strip().lower() != only:
        raise _invalid(variable, f"{value!r} is not supported, only {only} is")


def _check_file(variable: str, environ: Mapping[str, str]) -> None:
    value = environ.get(variable, "")
    if value and not Path(value).is_file():
        raise _invalid(variable, f"there is no file {value}")
