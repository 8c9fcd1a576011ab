"""A receiver of OTLP, over gRPC or HTTP, for tests that look at what a program sends; never forwards anything."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span

Value = str | int | float | bool


def attributes(pairs: Any) -> dict[str, Value]:
    """Of a repeated KeyValue of plain values."""

    def plain(pair: KeyValue) -> Value:
        value: Value = getattr(pair.value, pair.value.WhichOneof("value") or "string_value")
        return value

    return {pair.key: plain(pair) for pair in pairs}


@dataclass
class OtlpReceiver:
    """What came so far, in order; each with the attributes of the resource that sent it. `endpoint` and `protocol` are
    for OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_EXPORTER_OTLP_PROTOCOL. Calls wait until `is_open` is set, so that a test
    can have a receiver that hangs; `num_calls` counts them as they come in. `headers` are those of the last one."""

    protocol: Literal["grpc", "http/protobuf"]
    endpoint: str = ""
    spans: list[tuple[dict[str, Value], Span]] = field(default_factory=list)
    metrics: list[tuple[dict[str, Value], Metric]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    num_calls: int = 0
    is_open: threading.Event = field(default_factory=threading.Event)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def wait(self, is_there: Callable[[OtlpReceiver], bool], timeout_s: float = 30.0) -> None:
        """Until something that came makes it true."""
        with self._changed:
            assert self._changed.wait_for(lambda: is_there(self), timeout_s), (
                f"{self.num_calls} calls brought spans {[span.name for _, span in self.spans]}"
                f" and metrics {sorted({metric.name for _, metric in self.metrics})}"
            )

    def span(self, name: str) -> Span:
        """The only one of this name."""
        (found,) = [span for _, span in self.spans if span.name == name]
        return found

    def metric(self, name: str) -> Metric:
        """As it came last."""
        return [metric for _, metric in self.metrics if metric.name == name][-1]

    def called(self, headers: Mapping[str, str]) -> None:
        with self._changed:
            self.num_calls += 1
            self.headers = {name.lower(): value for name, value in headers.items()}
            self._changed.notify_all()
        self.is_open.wait(60.0)

    def take_spans(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        with self._changed:
            for each in request.resource_spans:
                resource = attributes(each.resource.attributes)
                self.spans += [(resource, span) for scope in each.scope_spans for span in scope.spans]
            self._changed.notify_all()

    def take_metrics(self, request: metrics_service_pb2.ExportMetricsServiceRequest) -> None:
        with self._changed:
            for each in request.resource_metrics:
                resource = attributes(each.resource.attributes)
                self.metrics += [(resource, metric) for scope in each.scope_metrics for metric in scope.metrics]
            self._changed.notify_all()


@contextmanager
def otlp_receiver(
    protocol: Literal["grpc", "http/protobuf"], *, is_open: bool = True, port: int = 0
) -> Iterator[OtlpReceiver]:
    """`port`: of gRPC; 0: any."""
    receiver = OtlpReceiver(protocol)
    if is_open:
        receiver.is_open.set()
    with _grpc(receiver, port) if protocol == "grpc" else _http(receiver):
        try:
            yield receiver
        finally:
            receiver.is_open.set()


@contextmanager
def _grpc(receiver: OtlpReceiver, port: int) -> Iterator[None]:
    class Traces(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
            receiver.called({name: str(value) for name, value in context.invocation_metadata()})
            receiver.take_spans(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
        def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
            receiver.called({name: str(value) for name, value in context.invocation_metadata()})
            receiver.take_metrics(request)
            return metrics_service_pb2.ExportMetricsServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(), server)
    receiver.endpoint = f"http://127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    server.start()
    try:
        yield
    finally:
        receiver.is_open.set()
        server.stop(None).wait()


@contextmanager
def _http(receiver: OtlpReceiver) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            receiver.called(dict(self.headers.items()))
            if self.path == "/v1/traces":
                receiver.take_spans(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            elif self.path == "/v1/metrics":
                receiver.take_metrics(metrics_service_pb2.ExportMetricsServiceRequest.FromString(body))
            self.send_response(200 if self.path in ("/v1/traces", "/v1/metrics") else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Who sends may have gone before it is answered."""

    with Server(("127.0.0.1", 0), Handler) as server:
        receiver.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            receiver.is_open.set()
            server.shutdown()
            thread.join()
