"""Floor 4, observability: what is measured, how it is counted, and how metrics, traces and logs leave a process.

`telemetry.Telemetry` is what a process opens and closes. `metrics.instruments` is the one list of metrics; `tracing`
makes and sends spans; `logs` sets up logging. `otel_settings` reads OpenTelemetry's environment variables."""
