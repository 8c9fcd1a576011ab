"""Simulate a cluster (import layer 5): real engines and real request logic under a virtual clock.

No model runs, no KV is copied and no code sleeps: `cost` computes how long each step takes. `simulate.simulate` runs
one cluster of `cluster` under a workload and returns a report; `planner` searches for the cheapest deployment,
`scaling` runs autoscalers. Read `simulate` and `cluster.cluster` first.
"""
