"""Search for the cheapest deployment of each kind, mixed or split, that meets the latency targets of a workload.

`capacity_planner.CapacityPlanner` searches by simulation and begins at the lower bounds that `workload_demand`
computes. `break_even` finds where the cheaper kind changes when one property of the workload or link is scaled. Read
`capacity_planner` first.
"""
