"""The engine thread: the loop that plans, executes and commits steps, its calibration, watchdog and step log.

Start with `driver.EngineDriver`.
"""
