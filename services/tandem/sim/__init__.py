"""Floor 5, a cluster of real engines under a virtual clock; never runs a model, moves a byte or waits."""
