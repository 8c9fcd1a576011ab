"""What telemetry costs an engine's step and a streamed token."""
