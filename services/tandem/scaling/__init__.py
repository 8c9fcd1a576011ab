"""Decide how many prefill and decode workers there should be; pure: no clock, no I/O, no randomness."""
