"""How many tokens a step may compute: the step-time model, the step sizer and the split of prefill tokens.

`step_sizer` chooses a size from `step_time_model`; `prefill_sharing` splits what decodes leave among prompts.
"""
