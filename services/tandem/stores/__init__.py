"""Floor 4, what is kept in Redis; never judges whether a worker lives."""
