"""Schedule one engine (import layer 2): decide what each of its steps computes. Runs no model and reads no clock.

`scheduler.Scheduler` is the entry point: `add` accepts a job, `plan` returns the next `StepPlan`, and `commit` applies
its `StepResult`. `state` holds the sequences, limits, plans and results; `budget` computes how many tokens a step may
have; `phases` are the functions that build a plan, and those that apply its result. Read `scheduler` first, then
`state.sequence` and `state.step_plan`.
"""
