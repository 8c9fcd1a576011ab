"""Spans: trace context, sampling, encoding and sending."""
