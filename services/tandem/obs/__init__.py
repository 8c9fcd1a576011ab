"""Telemetry: what is measured, how it is counted, and how metrics, traces and logs leave a process."""
