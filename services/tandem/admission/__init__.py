"""Floor 2: decide quotas and the order of waiting requests; the clock and the stores are the caller's."""
