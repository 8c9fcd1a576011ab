"""Compute how many prompt tokens a step may have, and which prompts get them.

`step_time_model` predicts the time of a step from measured ones, with the solver in `nnls`. `step_sizer` chooses from
it the prompt tokens of each step, and `prefill_sharing` splits these among prompts. Read `step_sizer` first.
"""
