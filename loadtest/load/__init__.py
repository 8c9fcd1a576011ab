"""`python -m loadtest load` and `compare`: a load test of a running endpoint, its report and its comparison."""
