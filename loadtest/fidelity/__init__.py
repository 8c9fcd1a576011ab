"""Measure the error of the simulator against real runs, and run the disaggregation experiment."""
