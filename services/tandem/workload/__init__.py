"""Requests and when they come: mixes, arrivals and traces, the same for the simulator and for load tests."""
