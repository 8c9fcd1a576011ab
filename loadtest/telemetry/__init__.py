"""Cost of telemetry per engine step and streamed token."""
