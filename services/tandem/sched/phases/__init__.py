"""The phases of one step's plan: admission, decodes, prefills, speculation, forks and blocked pulls.

`plan_builder` holds the plan while it is built.
"""
