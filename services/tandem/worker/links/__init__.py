"""Measured links: how fast this worker reads each other worker's memory, and over what kind of link.

Start with `link_monitor`, which decides what to measure; `link_probe` measures; `link_reports` keeps the results.
"""
