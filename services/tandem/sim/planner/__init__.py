"""The capacity planner: the cheapest deployment of each kind that meets the targets of a workload.

Start with `capacity_planner`.
"""
