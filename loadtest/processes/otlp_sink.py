"""Receive OTLP over gRPC in a process of its own, accept everything and store nothing.

    python -m loadtest.processes.otlp_sink

Prints its endpoint on stdout and serves until stdin ends; then it prints the number of calls and bytes by signal.
"""

from __future__ import annotations

import json
import sys
from concurrent import futures
from typing import Any

import grpc

SIGNALS = {
    "traces": "opentelemetry.proto.collector.trace.v1.TraceService",
    "metrics": "opentelemetry.proto.collector.metrics.v1.MetricsService",
}


class Sink:
    """Count the calls and bytes of one OpenTelemetry signal."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_bytes = 0

    def take(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.num_calls += 1
        self.num_bytes += len(request)
        return b""  # an empty message: everything was accepted

    def handler(self, service: str) -> Any:
        taken = grpc.unary_unary_rpc_method_handler(self.take)
        return grpc.method_handlers_generic_handler(service, {"Export": taken})


def main() -> int:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    sinks = {signal: Sink() for signal in SIGNALS}
    server.add_generic_rpc_handlers([sinks[signal].handler(service) for signal, service in SIGNALS.items()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    _print({"endpoint": f"http://127.0.0.1:{port}"})
    sys.stdin.read()
    server.stop(0).wait()
    _print({signal: [sink.num_calls, sink.num_bytes] for signal, sink in sinks.items()})
    return 0


def _print(facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
