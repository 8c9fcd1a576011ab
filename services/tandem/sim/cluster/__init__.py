"""The simulated cluster: clients, gateways, workers, network and faults around the product's own engine and flow.

Start with `cluster.SimCluster`.
"""
