"""The phases of one step as functions over `SchedulerState`: decodes, admission, prefills, speculation, preemption, and
the results of a finished plan.

`plan_builder` holds the plan while it is built.
"""
