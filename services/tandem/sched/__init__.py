"""Floor 2, the scheduler: what each step of one engine computes. It runs no model and reads no clock.

`scheduler.Scheduler` owns every live sequence; `plan` returns a `StepPlan` and `commit` applies what came of it.
`state` holds what it works on, `budget` how many tokens a step may compute, `phases` the parts of a plan, `transfer`
sequences whose KV moves. Read `scheduler` first."""
