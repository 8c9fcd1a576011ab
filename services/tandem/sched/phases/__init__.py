"""The phases of one step, as functions over `SchedulerState` that `Scheduler` calls in a fixed order.

`slices` plans decodes and prompt chunks and preempts sequences, `admit_waiting` starts sequences, `spec_decode` adds
draft tokens, and `apply_results` applies the result of a finished plan. `plan_builder` holds the plan while it is
built. `job_admission` checks new jobs; `decode_run` plans many identical decode steps in one call. Read `plan_builder`
and `slices` first.
"""
