"""Start, pause and end servers and workers for measurements."""
