"""Measure the engine without servers: offline workloads, steps of a whole model, and the start of `tandem serve`."""
