"""Error of the simulator against measured runs, and the disaggregation experiment."""
