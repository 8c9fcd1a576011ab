"""The phases of one step's plan: admission, decodes, prefills, speculation and forks.

`plan_builder` holds the plan while it is built.
"""
