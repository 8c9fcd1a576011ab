"""Define and count metrics, and send metrics, trace spans and logs out of a process (import layer 4).

`telemetry.Telemetry` is what a process opens at its start and closes at its end. `metrics.instruments` lists every
metric, `metrics.metrics.Metrics` counts them. `tracing` begins and ends spans, `logs.logging_setup` sets up logging.
`otel_settings` reads OpenTelemetry's environment variables. Read `telemetry` first.
"""
