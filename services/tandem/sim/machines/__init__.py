"""Describe what can be deployed in a simulation: accelerators, measured profiles and pools of workers.

`deployment.Deployment` describes pools of workers on one kind of machine, and its `cluster` method returns the spec of
the cluster to simulate. Read `deployment` first.
"""
