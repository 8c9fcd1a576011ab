"""What the scheduler works on: sequences, queues, limits, plans and results.

`scheduler_state.SchedulerState` owns the sequences and is the only place that moves them between queues. `step_plan`
and `schedule_result` are the values that leave the scheduler, `limits` and `slo_targets` those that configure it. Read
`sequence`, `step_plan` and `scheduler_state` first.
"""
