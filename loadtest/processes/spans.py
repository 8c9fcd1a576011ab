"""Receive the trace spans of programs under measurement, by OTLP over gRPC in a thread of this process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import NamedTuple

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from loadtest.processes.otlp_sink import SIGNALS


class TimedSpan(NamedTuple):
    """Hold one span of a trace; times are seconds since the epoch."""

    name: str
    began_at: float
    ended_at: float


class SpanReceiver:
    """Keep the spans that have arrived, by the hexadecimal id of their trace. `environment`: the variables with which a
    program sends its traces here."""

    def __init__(self, endpoint: str) -> None:
        self.environment = {
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_METRICS_EXPORTER": "none",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "OTEL_TRACES_SAMPLER": "always_on",
            "OTEL_BSP_SCHEDULE_DELAY": "200",  # milliseconds
        }
        self._spans: defaultdict[str, list[TimedSpan]] = defaultdict(list)

    def spans(self, trace: str) -> list[TimedSpan]:
        return list(self._spans.get(trace, ()))

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    timed = TimedSpan(span.name, span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9)
                    self._spans[span.trace_id.hex()].append(timed)


@contextmanager
def span_receiver() -> Iterator[SpanReceiver]:
    """Run a receiver on a free port of the loopback interface inside the context."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    receiver = SpanReceiver(f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")

    def take(request: ExportTraceServiceRequest, context: grpc.ServicerContext) -> bytes:
        receiver.take(request)
        return b""  # an empty message: everything was accepted

    taken = grpc.unary_unary_rpc_method_handler(take, request_deserializer=ExportTraceServiceRequest.FromString)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SIGNALS["traces"], {"Export": taken})])
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait()
