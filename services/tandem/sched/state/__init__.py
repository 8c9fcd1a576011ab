"""What the scheduler works on: sequences, queues, limits, plans and results; `scheduler_state` owns the sequences.

Read `sequence`, `step_plan` and `scheduler_state` first.
"""
