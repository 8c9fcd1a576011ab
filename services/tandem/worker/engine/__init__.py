"""Run the engine thread: the loop that plans, executes and commits steps.

`driver.EngineDriver` owns the thread and is the entry point; other threads reach the engine only through its `post` and
`call`. `calibrate` times a few steps before the first request, `watchdog` notices a step that hangs, and
`step_log_writer` writes each step to a file. Read `driver` first.
"""
