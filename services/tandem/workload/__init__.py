"""Generate requests and their due times from mixes, arrival processes and traces, for the simulator and for load tests
alike."""
