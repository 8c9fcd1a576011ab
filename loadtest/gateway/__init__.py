"""Measure the cost of the gateway: its front end with nothing behind it, authentication, and each hop of a request."""
