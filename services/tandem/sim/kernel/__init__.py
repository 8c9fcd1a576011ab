"""The discrete-event core: virtual time, one total order of events, and a digest of what happened."""
