"""Measure the cost of telemetry per engine step and per streamed token."""
