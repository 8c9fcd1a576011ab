"""Compute how long a simulated step takes.

`executor.SimExecutor` replaces the model of a worker; its step times come from a `roofline`, or from a measured step
cost with `residuals`. `hardware` and `model_shapes` hold the figures of accelerators and models. Read
`executor` first, then `roofline`.
"""
