"""Floor 3: the state machine of one request, without I/O."""
