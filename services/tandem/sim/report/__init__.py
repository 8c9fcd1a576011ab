"""What a simulated run amounts to: latencies, rates, time series, tables and charts."""
