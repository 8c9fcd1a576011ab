"""Measured links: how fast this worker reads each other worker's memory, and over what kind of link.

Start with `link_monitor`, which decides what to measure and keeps the results; `link_probe` measures.
"""
