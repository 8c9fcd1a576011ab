"""Floor 2: choose the workers of a request from reports, without calling workers."""
