"""Scale a cluster to its demand: observe gateways and workers, decide pool sizes, and apply them.

The package is the program `tandem planner`; the decision itself is made by the pure `scaling.scaler.Scaler`. `main.run`
is the entry point, and `planner_loop.Planner.plan` makes and applies one decision; read that first. `actuator` defines
how a decision is applied: `serve_actuator` publishes targets that `serve_policy` reads inside Ray Serve, and
`raycluster_actuator` changes the worker groups of a Kubernetes RayCluster itself.
"""
