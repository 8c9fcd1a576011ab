"""Floor 2, what each step computes; never runs a model and never reads a clock."""
