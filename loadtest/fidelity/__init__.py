"""How far the simulator is from measured runs, and the disaggregation experiment."""
