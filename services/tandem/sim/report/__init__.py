"""Compute and show the results of a simulated run: latencies, rates, time series, tables and charts.

`report.LatencyStats` collects the requests as they end, `report.report` computes the figures of the run, `table`
and `chart` show them. Read `report` first.
"""
