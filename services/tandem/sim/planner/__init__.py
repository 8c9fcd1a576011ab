"""Search the cheapest deployment of each kind, mixed or split, that meets the latency targets of a workload.

`capacity_planner.CapacityPlanner` searches by simulation, above the lower bounds of `workload_demand`; `break_even`
scales one property of the workload. Read `capacity_planner` first.
"""
