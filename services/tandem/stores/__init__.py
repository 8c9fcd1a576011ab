"""Floor 4, what is kept in Redis, and the file of settings; never judges whether a worker lives."""
