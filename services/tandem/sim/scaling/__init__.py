"""Simulate clusters in which an autoscaler changes the number of workers.

`autoscale.simulate_elastic` runs a workload while `autoscale.AutoscaledCluster` starts and drains workers;
`queue_scaler` is a baseline to compare with. Read `autoscale` first.
"""
