"""What the scheduler works on: sequences, queues, limits, plans and results.

Read `sequence` and `step_plan` first.
"""
