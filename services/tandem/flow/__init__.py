"""Floor 3, one request's life as a table; never does I/O."""
