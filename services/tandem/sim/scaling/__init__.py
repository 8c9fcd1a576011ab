"""Simulate clusters in which an autoscaler changes the number of workers.

`autoscale.simulate_elastic` runs a workload, `autoscaled_cluster` starts and drains workers, `queue_scaler` is a
baseline to compare with. Read `autoscale` first.
"""
