"""Measure the cost of moving KV: hand-offs, remote prefixes, drains and raw transfers."""
