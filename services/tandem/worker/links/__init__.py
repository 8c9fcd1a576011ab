"""Measure links: how fast this worker reads each other worker's memory, and over what type of link.

`link_monitor` decides what to measure, runs the measurements and keeps the newest report of each source (a worker that
this one may read from). `link_probe` measures one link by timed reads. The entry point is `LinkMonitor`, whose reports
gateways receive over their Watch streams. Read `link_monitor` first.
"""
