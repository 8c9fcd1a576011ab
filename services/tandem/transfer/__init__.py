"""Floor 4, moves KV blocks between workers; never decides which."""
