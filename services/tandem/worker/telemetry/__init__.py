"""Measure and export metrics and trace spans of a worker.

`worker_telemetry.WorkerTelemetry` is the entry point: it owns the metrics, the /metrics endpoint and the trace spans.
`gauges` reads the worker's present state, `counters` counts steps, ended jobs and their transfers, and `job_spans`
builds the trace spans of a job. Read `worker_telemetry` first.
"""
