"""The load generator: workloads, when calls are due, HTTP calls, and the records of what came back."""
