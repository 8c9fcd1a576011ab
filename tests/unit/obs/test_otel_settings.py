"""Test the OTEL_ variables: the settings that they give, and errors that name an invalid variable."""

from __future__ import annotations

import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.obs.otel_settings import read_otel

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
SENT = {ENDPOINT: "http://collector:4318"}
GRPC = {ENDPOINT: "collector:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}


@pytest.mark.parametrize(
    ("environ", "traces", "metrics"),
    [
        ({}, (), ()),
        (SENT, ("otlp",), ("otlp",)),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:1"}, ("otlp",), ()),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c:1"}, (), ("otlp",)),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, ("otlp",), ()),
        ({"OTEL_TRACES_EXPORTER": "console, otlp"}, ("otlp", "console"), ()),
        (SENT | {"OTEL_TRACES_EXPORTER": "none"}, (), ("otlp",)),
        (SENT | {"OTEL_METRICS_EXPORTER": "prometheus"}, ("otlp",), ()),
        (SENT | {"OTEL_SDK_DISABLED": "TRUE"}, (), ()),
        (SENT | {"OTEL_SDK_DISABLED": "false"}, ("otlp",), ("otlp",)),
        ({ENDPOINT: ""}, (), ()),
    ],
)
def test_a_signal_goes_to_the_endpoint_of_its_variable(
    environ: dict[str, str], traces: tuple[str, ...], metrics: tuple[str, ...]
) -> None:
    settings = read_otel(environ)
    assert (settings.traces, settings.metrics) == (traces, metrics)


def test_the_protocol_is_http_unless_a_variable_sets_another() -> None:
    assert read_otel({}).traces_protocol == "http/protobuf"
    both = read_otel(GRPC | {"OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/protobuf", ENDPOINT: "http://c:1"})
    assert (both.traces_protocol, both.metrics_protocol) == ("grpc", "http/protobuf")


@pytest.mark.parametrize(
    ("environ", "interval_s", "timeout_s"),
    [
        ({}, 60, 10),
        ({"OTEL_METRIC_EXPORT_INTERVAL": "1500", "OTEL_METRIC_EXPORT_TIMEOUT": "5000"}, 1.5, 5),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "20"}, 60, 20),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "2", "OTEL_EXPORTER_OTLP_METRICS_TIMEOUT": "25"}, 60, 25),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "99"}, 60, 30),
    ],
)
def test_metrics_have_their_times(environ: dict[str, str], interval_s: float, timeout_s: float) -> None:
    settings = read_otel(environ)
    assert (settings.metrics_interval_s, settings.metrics_timeout_s) == (interval_s, timeout_s)


@pytest.mark.parametrize(
    ("environ", "variable"),
    [
        ({"OTEL_TRACES_EXPORTER": "jaeger"}, "OTEL_TRACES_EXPORTER"),
        ({"OTEL_TRACES_EXPORTER": "prometheus"}, "OTEL_TRACES_EXPORTER"),
        ({"OTEL_METRICS_EXPORTER": "otlp,zipkin"}, "OTEL_METRICS_EXPORTER"),
        ({"OTEL_SDK_DISABLED": "yes"}, "OTEL_SDK_DISABLED"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "OTEL_EXPORTER_OTLP_PROTOCOL"),
        (SENT | {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "udp"}, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"),
        ({ENDPOINT: "collector:4318"}, ENDPOINT),
        ({ENDPOINT: "http://"}, ENDPOINT),
        ({ENDPOINT: "http://collector:99999"}, ENDPOINT),
        ({ENDPOINT: "ftp://collector"}, ENDPOINT),
        (GRPC | {ENDPOINT: "collector:none"}, ENDPOINT),
        (SENT | {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "x"}, "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"),
        (SENT | {"OTEL_TRACES_SAMPLER": "sometimes"}, "OTEL_TRACES_SAMPLER"),
        (SENT | {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "10%"}, "OTEL_TRACES_SAMPLER_ARG"),
        (SENT | {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "1.1"}, "OTEL_TRACES_SAMPLER_ARG"),
        (SENT | {"OTEL_BSP_SCHEDULE_DELAY": "0"}, "OTEL_BSP_SCHEDULE_DELAY"),
        (SENT | {"OTEL_BSP_MAX_QUEUE_SIZE": "1.5"}, "OTEL_BSP_MAX_QUEUE_SIZE"),
        (SENT | {"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "4096"}, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"),
        (SENT | {"OTEL_SPAN_EVENT_COUNT_LIMIT": "-1"}, "OTEL_SPAN_EVENT_COUNT_LIMIT"),
        (SENT | {"OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "long"}, "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT"),
        (SENT | {"OTEL_EXPORTER_OTLP_TIMEOUT": "-1"}, "OTEL_EXPORTER_OTLP_TIMEOUT"),
        (SENT | {"OTEL_EXPORTER_OTLP_TIMEOUT": "nan"}, "OTEL_EXPORTER_OTLP_TIMEOUT"),
        (SENT | {"OTEL_EXPORTER_OTLP_COMPRESSION": "zip"}, "OTEL_EXPORTER_OTLP_COMPRESSION"),
        (GRPC | {"OTEL_EXPORTER_OTLP_COMPRESSION": "deflate"}, "OTEL_EXPORTER_OTLP_COMPRESSION"),
        (GRPC | {"OTEL_EXPORTER_OTLP_INSECURE": "1"}, "OTEL_EXPORTER_OTLP_INSECURE"),
        (SENT | {"OTEL_EXPORTER_OTLP_CERTIFICATE": "/nowhere/ca.pem"}, "OTEL_EXPORTER_OTLP_CERTIFICATE"),
        (SENT | {"OTEL_RESOURCE_ATTRIBUTES": "a=1,b"}, "OTEL_RESOURCE_ATTRIBUTES"),
        ({"OTEL_METRIC_EXPORT_INTERVAL": "often"}, "OTEL_METRIC_EXPORT_INTERVAL"),
        ({"OTEL_METRIC_EXPORT_TIMEOUT": "inf"}, "OTEL_METRIC_EXPORT_TIMEOUT"),
        (
            SENT | {"OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "delta"},
            "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE",
        ),
        (
            SENT | {"OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION": "base2_exponential_bucket_histogram"},
            "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION",
        ),
    ],
)
def test_a_value_that_means_nothing_is_named(environ: dict[str, str], variable: str) -> None:
    with pytest.raises(TandemError) as raised:
        read_otel(environ)
    assert (raised.value.kind, raised.value.param) == (ErrorKind.INVALID_REQUEST, variable)
    assert raised.value.message.startswith(f"{variable}: ")


def test_headers_are_never_quoted() -> None:
    with pytest.raises(TandemError) as raised:
        read_otel(SENT | {"OTEL_EXPORTER_OTLP_HEADERS": "api-key s3cret"})
    assert raised.value.param == "OTEL_EXPORTER_OTLP_HEADERS" and "s3cret" not in raised.value.message


@pytest.mark.parametrize("endpoint", ["collector:4317", "http://collector:4317", "https://[::1]:4317", "collector"])
def test_grpc_takes_addresses_without_a_scheme(endpoint: str) -> None:
    assert read_otel(GRPC | {ENDPOINT: endpoint}).traces == ("otlp",)
