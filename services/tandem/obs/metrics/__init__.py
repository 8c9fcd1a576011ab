"""Define, count and export the metrics of one process.

`instruments` lists every metric, `metrics.Metrics` counts them. `prometheus` exposes them to Prometheus, also under
vLLM's names (`vllm_metrics`); `metrics_server` serves that over HTTP for programs without a server of their own.
`metric_exporter` sends them to OpenTelemetry receivers at intervals. Read `metrics` first."""
