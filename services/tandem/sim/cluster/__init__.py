"""Simulate a cluster: clients, gateways, workers, network and faults around the product's own engine and director.

`cluster.SimCluster` builds one from a `ClusterSpec` and runs a workload on it; `gateway` and `worker` drive the
product's classes under the virtual clock. Read `cluster` first, then `gateway` and `worker`.
"""
