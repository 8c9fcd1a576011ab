"""Run a load test of an endpoint, report it and compare two reports: `python -m loadtest load` and `compare`."""
