"""Floor 5, the preflight: looks at what Tandem needs here and says what to do; never changes anything it looks at."""
